"""Builds the user's own model on the meta device, without allocating memory, to check the model's modules and count its
parameters.

Shapes: S tokens, D model width, V vocabulary; one sequence.
"""

from functools import cache

import torch

from engine.config.checks.supported import unsupported
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.sections.model import Model
from engine.metering.meter import Meter
from engine.model.interface import described, implementation_of
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import META, ParameterFactory

EMBEDDING, NORM, HEAD = "embedding", "norm", "head"


def check_own_model(layout: Layout) -> None:
    """Raise LayoutError if the user's own model cannot be loaded, does not support the layout, or contains a module
    that cannot be built, raises an error in its forward pass, or returns a wrong shape. The check runs the user's code.
    The built-in model needs no check."""
    if layout.model.own:
        if refusal := unsupported(layout, implementation_of(layout.model).support):
            raise LayoutError(refusal)
        parameters_of(layout.model)


@cache
def parameters_of(model: Model) -> dict[str, int]:
    """The number of parameters of each part; the parts are `embedding`, `layers.N`, `norm` and `head`. A shared
    parameter is counted only in the first part that uses it. Raises LayoutError if a part cannot be built, raises an
    error in its forward pass, or returns a wrong shape."""
    counted: dict[str, int] = {}
    seen: set[torch.nn.Parameter] = set()
    shape = [1, model.seq_len, model.d_model]
    part, legal = "a part", "parts that can be built and run on the meta device, without .item()"
    try:
        stage = _whole(model)
        x = torch.empty(1, model.seq_len, dtype=torch.int64, device=META)
        parts = {EMBEDDING: stage.embedding} | {f"layers.{n}": block for n, block in stage.layers.items()}
        for part, module in (parts | {NORM: stage.norm, HEAD: stage.head}).items():
            assert module is not None
            with torch.no_grad():
                x = module(x)
            wanted = [*shape[:2], model.vocab] if part == HEAD else shape
            if list(x.shape) != wanted:
                raise LayoutError(
                    f"model.implementation = {model.implementation}: {part} returns the shape {list(x.shape)} for one "
                    f"sequence; legal: {wanted}"
                )
            new = set(module.parameters()) - seen
            counted[part] = sum(parameter.numel() for parameter in new)
            seen |= new
    except LayoutError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise LayoutError(
            f"model.implementation = {model.implementation} fails in {part}: {described(error)}; legal: {legal}"
        ) from error
    return counted


def _whole(model: Model) -> Stage:
    meter = Meter(model.layers, model.moe.experts if model.moe else 0)
    factory = ParameterFactory(0, Axis("tp", None, meter), Axis("ep", None, meter), deferred=True)
    return Stage(factory, model, range(model.layers), KnobValues(), meter)
