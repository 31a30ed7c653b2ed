"""Synchronises CUDA streams around gradient reductions. On the CPU these functions do nothing.

FSDP2 reduces gradients on a separate CUDA stream. FSDP2 makes the compute stream wait for these reductions only after
the last backward pass. If the compute stream reads the results of earlier reductions, the engine must synchronise the
streams itself.
"""

import torch
from torch import Tensor

WriteEvent = torch.cuda.Event | None


def mark_write(x: Tensor) -> WriteEvent:
    """Record an event after the current stream's writes to `x`."""
    return torch.cuda.current_stream().record_event() if x.is_cuda else None


def wait_for_write(written: WriteEvent) -> None:
    """Make the current stream wait for the writes that precede the event `written`."""
    if written is not None:
        written.wait()


def keep_for_current_stream(x: Tensor) -> None:
    """Keep the allocator from reusing the memory of `x`, which was allocated on another stream, until the current
    stream has finished with `x`."""
    if x.is_cuda:
        x.record_stream(torch.cuda.current_stream())
