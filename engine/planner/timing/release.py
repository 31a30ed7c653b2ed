"""Framework releases: which exchanges each release overlaps with computation, and a fitted factor on its step time."""

import tomllib
from functools import lru_cache
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct


class Release(Struct, frozen=True):
    """A framework release. `factor`: the predicted step time is multiplied by this number, which is fitted to published
    measurements; `source`: where the other values are documented. `overlap_tp`: matmuls are split into pieces that
    overlap with the all-gathers and reduce-scatters of tp. `overlap_dp`: gradients are reduced and weights are gathered
    while layers compute. `overlap_pp`: sends between stages are hidden behind computation. `gradient_bytes`: bytes per
    gradient in a reduction."""

    factor: Annotated[float, Meta(gt=0, le=10)] = 1.0
    overlap_tp: bool = False
    overlap_dp: bool = True
    overlap_pp: bool = False
    gradient_bytes: int = 4
    source: str = ""


@lru_cache(maxsize=1)
def releases() -> dict[str, Release]:
    """The framework releases in releases.toml, by name."""
    text = resources.files(__package__).joinpath("releases.toml").read_text()
    return msgspec.convert(tomllib.loads(text), dict[str, Release])


def release(name: str | None) -> Release:
    """The framework release `name` from releases.toml; for None, the engine itself, whose step times are not scaled."""
    return Release() if name is None else releases()[name]
