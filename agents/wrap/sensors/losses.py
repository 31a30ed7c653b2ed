"""The loss of a step: the scalars on which the program calls `backward`.

A loop that accumulates gradients usually divides the loss of each micro-batch by the number of micro-batches. If the
losses were divided by the number of micro-batches, the loss of the step is their sum; otherwise it is their mean. The
number by which the loop divided a loss is read from the autograd graph.
"""

import math
from dataclasses import dataclass, field
from typing import Any

DIVISION, PRODUCT = "DivBackward0", "MulBackward0"


@dataclass(frozen=True)
class Scalar:
    """One loss: a number or, for a loss on a GPU, an asynchronous copy to the CPU. `event` signals that the copy is
    done.
    """

    value: Any
    divisor: float | None  # the number by which the program divided the loss; None: unknown
    event: Any = None

    @property
    def ready(self) -> bool:
        return self.event is None or bool(self.event.query())

    def read(self) -> float:
        return float(self.value)


@dataclass
class StepLoss:
    """The losses of one step."""

    scalars: list[Scalar] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        return all(scalar.ready for scalar in self.scalars)

    def value(self) -> float | None:
        """The loss of the step; None if the program did not call `backward` on a scalar."""
        if not self.scalars:
            return None
        values, count = [scalar.read() for scalar in self.scalars], len(self.scalars)
        divided = all(one.divisor is not None and math.isclose(one.divisor, count) for one in self.scalars)
        return sum(values) if divided else sum(values) / count


class Losses:
    """Collects the losses of the step in progress. A program with several optimizers may call `backward` before the
    step of each optimizer. At the end of an optimizer's step, the losses recorded since the previous optimizer's step
    replace the earlier ones; if there are none, the earlier losses are kept."""

    def __init__(self) -> None:
        self._since: list[Scalar] = []
        self._last: list[Scalar] = []
        # Id of the output of a GradScaler, and the loss itself.
        self._unscaled: tuple[int, Scalar] | None = None

    def scaled(self, output: Any, loss: Any) -> None:
        """Record that a GradScaler computed `output` from `loss`; the program then calls `backward` on `output`."""
        scalar = read(loss)
        self._unscaled = (id(output), scalar) if scalar else None

    def backward(self, tensor: Any, in_optimizer: bool) -> None:
        """Record a call to `backward` on a tensor. If an optimizer evaluates the loss several times in its step, only
        the first loss counts.
        """
        if in_optimizer and self._since:
            return
        scaled, self._unscaled = self._unscaled, None
        scalar = scaled[1] if scaled and scaled[0] == id(tensor) else read(tensor)
        if scalar:
            self._since.append(scalar)

    def end_optimizer(self) -> None:
        """Record the end of an optimizer's step."""
        if self._since:
            self._last, self._since = self._since, []

    def take(self) -> StepLoss:
        """The losses of the step that is ending."""
        taken, self._last = StepLoss(self._last), []
        return taken


def read(tensor: Any) -> Scalar | None:
    """The value of a loss; None if the tensor is not a real scalar, or if reading it would wait for a device."""
    import torch

    if tensor.numel() != 1 or tensor.is_complex():
        return None
    value = tensor.detach()
    if value.device.type == "cpu":
        return Scalar(float(value), divisor(tensor))
    if value.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None  # reading would wait for the device
    host = torch.empty((), dtype=torch.float32, pin_memory=True)
    host.copy_(value.reshape(()), non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return Scalar(host, divisor(tensor), event)


def divisor(tensor: Any) -> float | None:
    """The number by which the program divided a loss in its last operation, read from the autograd node. None if the
    last operation is not a division by a number, or if the divisor is on a GPU, because reading it would block."""
    node = tensor.grad_fn
    name = node.name() if node is not None else ""
    if name not in (DIVISION, PRODUCT):
        return None
    other = getattr(node, "_saved_other", None)
    if other is None or other.numel() != 1 or other.device.type != "cpu" or other.requires_grad:
        return None
    by = float(other)
    if name == PRODUCT:
        return 1 / by if by else None
    return by
