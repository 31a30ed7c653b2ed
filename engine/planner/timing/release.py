"""What the planner knows of a framework's release: which exchanges it hides, and one fitted factor on its time."""

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct


class Release(Struct, frozen=True):
    """`factor` is fitted, all else is documented by the source. `overlap_tp`: products run in pieces while tp gathers
    and scatters. `overlap_dp`: gradients are reduced and weights gathered while layers compute. `overlap_pp`: sends
    between stages do not hold them up. `gradient_bytes`: of a number in a gradient reduction."""

    factor: Annotated[float, Meta(gt=0, le=10)] = 1.0
    overlap_tp: bool = False
    overlap_dp: bool = True
    overlap_pp: bool = False
    gradient_bytes: int = 4
    source: str = ""


@lru_cache(maxsize=1)
def releases() -> dict[str, Release]:
    """The known releases by name."""
    text = resources.files(__package__).joinpath("releases.toml").read_text()
    return msgspec.convert(tomllib.loads(text), dict[str, Release])


def release(name: str | None) -> Release:
    """The release of that name; None: the engine itself, whose factor is 1."""
    return Release() if name is None else releases()[name]
