"""torch.compile for the element-wise functions between matmuls (`train.compile` in the layout).

Only functions of tensors are compiled, each as one graph that contains no modules, collectives or knobs. So compilation
does not affect traffic metering, routing, knob changes, FSDP or recompute. Matmuls and attention are not compiled,
because each is already one kernel.

Each rank compiles a function at its first call, for the shapes of that call (ranks on one machine share a compile
cache). When a shape changes, for example with the number of micro-batches, torch compiles the function again with a
dynamic size. The experts of a rank get a different number of token rows at each call, so this size is dynamic from the
start.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Ranks on one machine share its cores, so torch must not start a pool of compile workers in each.
OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {"compile_threads": 1}


class Compiler:
    """Compiles functions, or returns them unchanged if `on` is False."""

    def __init__(self, on: bool = False):
        self.on = on

    def __call__(self, function: Callable[P, R], any_size: bool = False) -> Callable[P, R]:
        if not self.on:
            return function
        return torch.compile(function, fullgraph=True, dynamic=any_size or None, options=OPTIONS)
