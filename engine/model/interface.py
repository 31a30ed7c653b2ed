"""The interface between the engine and a model: what training, sharding and telemetry need from the model.

A model is a list of blocks with an embedding before and a norm and a head after them. On each rank, the engine builds
the parts of the rank's pipeline stages (`engine.model.stage`), shards them, and computes the loss from the logits.
`engine.model.transformer.Transformer` is the built-in model; a layout selects another one with the key
``model.implementation``, whose value has the form ``"package.module:Name"`` (docs/train/own_model.md).

Shapes: B sequences of a micro-batch, S tokens of a sequence, s = S/tp tokens of this rank's slice (s = S without tp),
D = model.d_model, V = model.vocab. With cp, S is the number of tokens of this rank's cp slice.
"""

import importlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.config.checks.supported import Support
from engine.config.knob_values import KnobValues
from engine.config.refusal import LayoutError, shown
from engine.config.sections.model import BUILT_IN, Model
from engine.metering.meter import Meter
from engine.model.recompute import recomputed
from engine.parallel.parameters import ParameterFactory
from engine.planner.hardware.peaks import step_flops

__all__ = ["Block", "Implementation", "Model", "Parts", "Support", "implementation_of", "model_flops"]


@dataclass(frozen=True)
class Parts:
    """What an implementation needs to build the parts of a model: the sizes from the layout's section [model], the
    parameter factory, the knob values that each forward pass reads, and the meter."""

    factory: ParameterFactory
    model: Model
    knob_values: KnobValues
    meter: Meter


class Block(nn.Module):
    """Base class of a block, one layer of the model. If there is no pipeline, or with ZeRO 3, each block is an FSDP
    unit, and its experts are a separate unit.

    `forward` reads the knob `recompute`: `full` recomputes the whole block in the backward pass. Override `forward` to
    support other values or to receive `documents`, which are None if `Support.documents` is False.
    """

    def __init__(self, parts: Parts, layer: int):
        super().__init__()
        self.layer, self.knob_values, self.meter = layer, parts.knob_values, parts.meter

    def forward(self, x_BsD: Tensor, documents: Any = None) -> Tensor:
        with self.meter.in_layer(self.layer):
            if self.knob_values.recompute == "full":
                return recomputed(self.compute, x_BsD, meter=self.meter, layer=self.layer)
            return self.compute(x_BsD)

    def compute(self, x_BsD: Tensor) -> Tensor:
        """The output of the layer, [B, s, D], in the dtype of the input. `compute` must not draw random numbers, and
        must not wait for the device (no `.item()`)."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute")


@runtime_checkable
class Implementation(Protocol):
    """A model. The engine creates one object of the named class, without arguments, and asks it for the parts that a
    rank needs, so a method must not assume that other methods have been called.

    Parameters that the parts create themselves, such as those of `nn.Linear`, are initialised with the standard
    deviation that `std` returns. Create such parameters under ``torch.device("meta")``; otherwise each rank allocates
    them in full before they are sharded. Parameters from `parts.factory` can also be split over tp and ep. Parameter
    names begin with `embedding`, `layers.N` (N is the global layer index), `norm` and `head`. A mixture-of-experts
    layer (router and experts) is an `engine.model.moe.moe_layer.MoeLayer`, which also adds the auxiliary losses and
    counts the tokens of each expert.
    """

    support: Support

    def embedding(self, parts: Parts) -> nn.Module:
        """The embedding module, built on the first stage: token ids [B, S] (int64) -> [B, s, D]."""

    def block(self, parts: Parts, layer: int) -> Block:
        """The block of layer `layer`, counted from 0 in the whole model: [B, s, D] -> [B, s, D]."""

    def norm(self, parts: Parts) -> nn.Module:
        """The norm before the head, built on the last stage: [B, s, D] -> [B, s, D]."""

    def head(self, parts: Parts, embedding: nn.Module | None) -> nn.Module:
        """The output head, built on the last stage: [B, s, D] -> logits [B, S, V/tp]. `embedding` is None if the
        embedding is on another stage."""

    def std(self, model: Model, name: str, shape: torch.Size) -> float:
        """The standard deviation for the random initial values of a parameter that the factory has not created; 0 for
        constant initial values (`ParameterFactory.adopt`). The values depend on the name and on `run.seed`, not on the
        layout."""

    def multiply_adds(self, model: Model, layer: int | None) -> float:
        """Multiply-adds per token in the forward pass of layer `layer` without its routed experts; of the head if
        `layer` is None; NaN if unknown. The model FLOPs utilisation (MFU) counts 6 FLOPs for each of these
        multiply-adds: 2 in the forward pass and 4 in the backward pass."""


def implementation_of(model: Model) -> Implementation:
    """The `Implementation` given by the key `model.implementation`. This imports the user's module and so runs its
    code. Raises LayoutError if the import fails or the result is not an `Implementation`."""
    return _load(model.implementation)


def model_flops(
    model: Model, tokens: float, pairs: int, layers: Iterable[int] | None = None, head: bool = True
) -> float | None:
    """Model FLOPs of a step, as `engine.planner.hardware.peaks.step_flops` computes them from the multiply-adds that
    the model's implementation declares; None if it declares NaN."""
    flops = step_flops(model, tokens, pairs, layers, head, implementation_of(model).multiply_adds)
    return flops if isfinite(flops) else None


@cache
def _load(name: str) -> Implementation:
    module, _, attribute = ("engine.model.transformer:Transformer" if name == BUILT_IN else name).partition(
        ":"
    )
    refusal = f"model.implementation = {name}"
    try:
        made = getattr(_imported(module), attribute)()
    except Exception as error:  # the user's code may raise anything
        raise LayoutError(f"{refusal} cannot be loaded: {described(error)}; legal: {_LEGAL}") from error
    if not isinstance(made, Implementation) or not isinstance(made.support, Support):
        missing = [key for key in _MEMBERS if not hasattr(made, key)] or ["support, as a Support"]
        raise LayoutError(f"{refusal} has no {', '.join(missing)}; legal: {_LEGAL}")
    return made


_LEGAL = "transformer, or package.module:Name of a class like engine.model.interface.Implementation"
_MEMBERS = ("support", "embedding", "block", "norm", "head", "std", "multiply_adds")


def _imported(module: str) -> Any:
    """Import `module`. Python's search path comes first, then the current directory."""
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(module)
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def described(error: Exception) -> str:
    """The type and message of an error, as text for an error message."""
    return f"{type(error).__name__}: {shown(str(error))}"
