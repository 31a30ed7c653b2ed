"""Recompute (activation checkpointing): runs a part of a layer without saving the part's activations, and runs the
part's forward pass again during the backward pass.

`TransformerBlock.forward` in `engine/model/transformer.py` chooses the part to recompute according to the knob
`recompute`: nothing (`none`), the attention (`selective`) or the whole layer (`full`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.metering.meter import Meter


def recomputed(run: Callable[..., Tensor], *args: object, meter: Meter, layer: int) -> Tensor:
    """Return `run(*args)` without saving its activations. The backward pass calls `run` again; the meter counts the
    collectives of that second call as those of layer `layer`."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), meter.in_layer(layer)  # contexts of the first and of the second call

    out: Tensor = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return out
