"""What a loop that is not ours tells of one of its steps, while it runs and when it is over."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from agents.loop.vote import Word
from agents.protocol import Step, Summary, Value

if TYPE_CHECKING:
    from agents.loop.join import Loop

PHASES = 48  # with names of their own, in one step; what the wire takes, and some room


class StepReport:
    """One step, while it runs."""

    def __init__(self, loop: "Loop", step: int) -> None:
        self._loop = loop
        self.number = step
        self.phases: dict[str, float] = {}  # ms
        self.numbers: dict[str, float | None] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A part of the step with a name: its time is told, and that the rank is in it, should it get stuck."""
        name = name[:64] or "unnamed"
        before = self._loop.doing[1]
        self._loop.at(self.number, name)
        start = time.perf_counter()
        try:
            yield
        finally:
            if name in self.phases or len(self.phases) < PHASES:
                self.phases[name] = self.phases.get(name, 0.0) + 1e3 * (time.perf_counter() - start)
            self._loop.at(self.number, before)

    def report(
        self,
        *,
        loss: Any = None,
        tokens: Any = None,
        grad_norm: Any = None,
        lr: Any = None,
        mfu: Any = None,
        memory_bytes: Any = None,
    ) -> None:
        """What this rank knows of its step: any of it, in one call or several; whatever `float` takes.

        `loss` is the mean over this rank's `tokens`; the job's is their mean by tokens, and `grad_norm` is the
        largest that a rank tells. `mfu` is 0..1.
        """
        told = {"loss": loss, "tokens": tokens, "grad_norm": grad_norm, "lr": lr, "mfu": mfu}
        for name, value in (told | {"memory_bytes": memory_bytes}).items():
            if value is not None:
                self._loop.quietly(partial(self._note, name, value))

    def _note(self, name: str, value: Any) -> None:
        self.numbers[name] = float(value)

    def count(self, name: str) -> int | None:
        value = self.numbers.get(name)
        return int(value) if value is not None and 0 <= value < 2**53 else None

    def finite(self, name: str) -> float | None:
        value = self.numbers.get(name)
        return value if value is not None and math.isfinite(value) else None


def summary_of(
    step: Step, words: list[Word], everyone: bool, values: Mapping[str, Value], lr: float | None
) -> Summary:
    """The step of the whole job, as far as it is known; where ranks tell each other nothing, rank 0's own loss."""
    slowest = max(word.step_ms for word in words)
    tokens = [word.tokens for word in words if word.tokens is not None]
    losses = [(word.loss, word.tokens or 0) for word in words if word.loss is not None]
    weight = sum(count for _, count in losses)
    if weight:
        loss: float | None = sum(value * count for value, count in losses) / weight
    else:
        loss = sum(value for value, _ in losses) / len(losses) if losses else None
    mfus = [word.mfu for word in words if word.mfu is not None]
    return Summary(
        step=step.step,
        revision=step.revision,
        time_s=time.time(),
        loss=loss,
        grad_norm=max((word.grad_norm for word in words if word.grad_norm is not None), default=None),
        step_ms=slowest,
        tokens_per_s=1e3 * sum(tokens) / slowest if everyone and tokens and slowest else None,
        mfu=sum(mfus) / len(mfus) if everyone and mfus else None,
        bubble=None,
        bubble_bound=None,
        oversubscribed=False,
        a2a_bytes=None,
        comm={},
        dropped=None,
        load_max_over_mean=None,
        knobs=dict(values),
        lr=lr,
    )
