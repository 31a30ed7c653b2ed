"""Makes Megatron-Bridge train on CPUs over gloo.

Megatron-Bridge and its model catalogue import packages that cannot be installed without a GPU. This module replaces
these packages with modules in which every name is an empty class; the training loop, its callbacks, checkpoints, data
and model are Megatron-Bridge's own.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tests.ranks.adapters.megatron_lm.cpu import use_cpu

CATALOGUE = ("models", "peft", "models.conversion")
"""Packages of Megatron-Bridge that import all of their modules; only the modules in use are imported."""

ABSENT = (
    "megatron.bridge.models.conversion.",
    "megatron.bridge.peft.",
    "megatron.energon",
    "nvidia_resiliency_ext",
    "transformer_engine",
)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import hook for modules that are not installed here: every name in such a module is an empty class."""

    def find_spec(self, name: str, path: object, target: object = None) -> Any:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(ABSENT) else None
        )

    def create_module(self, spec: object) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _empty_class  # type: ignore[method-assign]


def installed() -> bool:
    """Whether Megatron-Bridge and Megatron-LM can be imported."""
    return bool(_folder() and find_spec("megatron.core") and find_spec("megatron.training"))


@functools.cache
def use_bridge_on_cpu() -> None:
    """Replace the functions and packages that need a GPU, so that `megatron.bridge.training` can be imported and
    run."""
    use_cpu()
    folder = _folder()
    assert folder
    _package("megatron.bridge", folder)
    for name in CATALOGUE:
        package = _package(f"megatron.bridge.{name}", folder / name.replace(".", "/"))
        package.__getattr__ = _empty_class  # type: ignore[method-assign]
    sys.meta_path.insert(0, Absent())
    torch.cuda.set_stream = lambda *_: None
    import megatron.bridge.training.setup as setup

    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)


def _folder() -> Path | None:
    """The folder of `megatron.bridge`, found without importing it."""
    megatron = find_spec("megatron")
    paths: Sequence[str] = (megatron and megatron.submodule_search_locations) or ()
    return next(
        (Path(path) / "bridge" for path in paths if (Path(path) / "bridge" / "training").is_dir()), None
    )


def _package(name: str, folder: Path) -> types.ModuleType:
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    parent, _, leaf = name.rpartition(".")
    setattr(sys.modules[parent], leaf, package)
    sys.modules[name] = package
    return package


def _empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
