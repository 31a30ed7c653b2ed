"""torch.compile for the element-wise functions between matrix products (`train.compile` in the layout).

Only functions of tensors are compiled, each as one graph without modules, collectives or knobs. So metering, routing
and knob changes work as without compilation, FSDP wraps the same modules, and recompute runs the same functions.
Matrix products and attention are not compiled: each is one kernel already.

Every rank compiles a function at its first call, for the shapes of that call (ranks on one machine share a cache). When
a shape changes, for example with the number of micro-batches, the function is compiled once more with that size
dynamic. The number of expert rows changes at every call, so it is dynamic from the start.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Ranks on one machine share its cores, so they start no pool of compile workers.
OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"compile_threads": 1}


class Compiler:
    """Compiles functions; with `on` False it returns them unchanged."""

    def __init__(self, on: bool = False):
        self.on = on

    def __call__(self, function: Callable[P, R], any_size: bool = False) -> Callable[P, R]:
        if not self.on:
            return function
        return torch.compile(function, fullgraph=True, dynamic=any_size or None, options=OPTIONS)
