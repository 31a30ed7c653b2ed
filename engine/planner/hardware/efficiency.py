"""The fraction of each peak rate that runs reach on a hardware generation, fitted to published measurements."""

import tomllib
from functools import lru_cache
from importlib import resources

import msgspec

from engine.planner.hardware.description import Efficiency


@lru_cache(maxsize=1)
def efficiencies() -> dict[str, Efficiency]:
    """The fitted fractions of the peak rates in efficiency.toml, by GPU generation, such as Hopper."""
    text = resources.files(__package__).joinpath("efficiency.toml").read_text()
    return msgspec.convert(tomllib.loads(text), dict[str, Efficiency])
