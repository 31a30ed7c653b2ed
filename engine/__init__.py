"""Trains Mixture-of-Experts transformers with 4D parallelism, through `engine run` or as a library.

`engine.config` and `engine.planner` work without torch, so this module imports the names below on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.preflight.package import package_refusal

if TYPE_CHECKING:
    from engine.config.layout import Layout
    from engine.config.refusal import LayoutError
    from engine.config.toml import load
    from engine.launch.run import run_layout
    from engine.train.trainer import Trainer

__all__ = ["Layout", "LayoutError", "Trainer", "load", "run_layout"]

_HOMES = {
    "Layout": "engine.config.layout",
    "LayoutError": "engine.config.refusal",
    "Trainer": "engine.train.trainer",
    "load": "engine.config.toml",
    "run_layout": "engine.launch.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    if why := package_refusal():
        raise ImportError(why)
    return getattr(import_module(_HOMES[name]), name)
