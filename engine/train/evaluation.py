"""Forward passes between two training steps, for validation and generated text."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from engine.metering.meter import Meter
from engine.train.computation import Computation


@contextmanager
def evaluation(computation: Computation, meter: Meter, **values: Any) -> Iterator[None]:
    """Context manager for forward passes that compute no gradients and do not affect training. Collective on entry and
    exit.

    The weights are gathered as for a training step. If the run keeps averaged weights, the forward passes use these
    instead of the current weights. What `meter` measures inside the context is not added to the measurements of the
    training step. Inside the context, knobs have the values in `values`, and activation recomputation is off.
    """
    knobs = computation.knob_values
    values["recompute"] = "none"
    kept = {name: getattr(knobs, name) for name in values}
    for name, value in values.items():
        setattr(knobs, name, value)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(meter.aside())
            if computation.average:
                stack.enter_context(computation.average.in_use())
            computation.shards.gather()
            yield
            computation.shards.release()
    finally:
        for name, value in kept.items():
            setattr(knobs, name, value)
