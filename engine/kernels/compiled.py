"""torch.compile for what lies between matrix products, where a layout asks for it (`train.compile`).

Only functions of tensors are compiled, each whole: there is no module, no collective and no dial in any of them. So
what is metered, routed or switched while the job runs does not know of it, FSDP wraps the same modules, and recompute
runs the same functions again. Matrix products and attention stay outside: each is one kernel already.

A function is compiled at its first call, for the shapes it sees, by every rank for itself (on one machine they share a
cache). When a shape changes, by another number of micro-batches say, it is compiled once more, for any size of what
changed; rows of experts, whose number is another at every call, are of any size from the start.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Ranks are forks that share the cores: they start no pool of compilers of their own.
OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"compile_threads": 1}


class Compiler:
    """Compiles functions, or with `on` False leaves them as they are."""

    def __init__(self, on: bool = False):
        self.on = on

    def __call__(self, function: Callable[P, R], any_size: bool = False) -> Callable[P, R]:
        if not self.on:
            return function
        return torch.compile(function, fullgraph=True, dynamic=any_size or None, options=OPTIONS)
