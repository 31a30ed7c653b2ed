"""Measures one step of a training loop: its phases and metrics, and the summary over all ranks."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

from agents.loop.vote import RankStep
from agents.protocol import Step, Summary, Value

PHASES = 48  # maximum number of named phases in a step; the protocol allows 64
RANKS_NAMED = 64  # maximum number of ranks in a summary whose loss is not finite


class Watched(Protocol):
    """The members of `Loop` that `StepReport` uses. `at()` sets the current operation, and `quietly()` calls a function
    and suppresses its exceptions.
    """

    doing: tuple[int, str, float]

    def at(self, step: int, text: str) -> None: ...

    def quietly(self, work: Callable[[], object]) -> None: ...


class StepReport:
    """The current step. The training program reports its phases and metrics with this object."""

    def __init__(self, loop: Watched, step: int, recorded: bool = True) -> None:
        self._loop = loop
        self.number = step
        self.recorded = recorded  # False: the program gave an illegal number, so the step is only measured
        self.phases: dict[str, float] = {}  # ms
        self.numbers: dict[str, float | None] = {}
        self.experts: Mapping[int, Sequence[int]] = {}  # number of pairs of each expert, by layer
        self.own_experts: dict[int, list[int]] | None = None  # the part of this rank, if it is not summed yet
        self.dropped: Mapping[int, int] = {}  # number of dropped pairs, by layer
        self.skipped = False  # the update was skipped, because a gradient was not finite

    @contextmanager
    def phase(self, name: str, doing: str = "") -> Iterator[None]:
        """Measure the time of a named part of the step. If the rank hangs, the cockpit shows the phase in which it
        hangs, or the operation `doing` if it is given.
        """
        name = name[:64] or "unnamed"
        before = self._loop.doing[1]
        self._loop.at(self.number, doing or name)
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
        loss_weight: Any = None,
        loss_scale: Any = None,
        skipped: Any = None,
    ) -> None:
        """Report metrics of this rank's step, in one call or several; each value must be convertible with `float`.

        `loss` is the mean over this rank's `tokens`; the job's loss is the mean over ranks, weighted by tokens, or by
        `loss_weight` where it is given. A rank with the weight 0, such as one without tokens, has no loss. All ranks
        that train on the same tokens, as in a tensor-parallel group, report them; they count once for the job. The
        job's `grad_norm` is the maximum over ranks, or NaN if it is NaN on a rank. `mfu` is 0..1. `loss_scale`: the
        factor on the loss before backward, with fp16; `skipped`: the scaler skipped the update, because a gradient
        overflowed.
        """
        metrics = {"loss": loss, "tokens": tokens, "grad_norm": grad_norm, "lr": lr, "mfu": mfu}
        metrics |= {"memory_bytes": memory_bytes, "loss_weight": loss_weight, "loss_scale": loss_scale}
        if skipped is not None:
            self.skipped = bool(skipped)
        for name, value in metrics.items():
            if value is not None:
                self._loop.quietly(partial(self._note, name, value))

    def report_experts(
        self, loads: Mapping[int, Sequence[int]], dropped: Mapping[int, int] | None = None
    ) -> None:
        """Report the expert load of the whole job: for each layer, the number of tokens routed to each expert.
        `dropped`: for each layer, how many token-expert pairs were dropped because they exceeded their expert's
        capacity. Only rank 0's report is used.
        """
        self.experts, self.dropped = loads, dropped or {}

    def report_own_experts(self, loads: dict[int, list[int]]) -> None:
        """Report the expert load of this rank's tokens: for each layer, the number of token-expert pairs of each
        expert. All ranks call this, with the same layers and experts. The exchange at the end of the step gathers the
        loads of all ranks, and rank 0 reports their sum.
        """
        self.own_experts = loads

    def _note(self, name: str, value: Any) -> None:
        self.numbers[name] = float(value)

    @property
    def loss(self) -> float | None:
        """This rank's loss; None if it reported none, or if the loss is the mean over nothing (its weight is 0)."""
        weight = self.finite("loss_weight")
        weight = self.count("tokens") if weight is None else weight
        return None if weight is not None and weight <= 0 else self.numbers.get("loss")

    def count(self, name: str) -> int | None:
        value = self.numbers.get(name)
        return int(value) if value is not None and 0 <= value < 2**53 else None

    def finite(self, name: str) -> float | None:
        value = self.numbers.get(name)
        return value if value is not None and math.isfinite(value) else None


def discard(step: AbstractContextManager[StepReport] | None) -> None:
    """Leave the context manager of a step without reporting the step, because the program did not execute the step."""
    if step:
        step.__exit__(GeneratorExit, GeneratorExit(), None)


def summed_loads(ranks: Sequence[RankStep]) -> dict[int, list[int]]:
    """The expert load of each layer, summed over all ranks."""
    parts = [rank.loads for rank in ranks if rank.loads is not None]
    layers = {layer for part in parts for layer in part}
    return {
        layer: [sum(pairs) for pairs in zip(*(part[layer] for part in parts if layer in part), strict=True)]
        for layer in sorted(layers)
    }


def summary_of(
    step: Step, ranks: list[RankStep], everyone: bool, values: Mapping[str, Value], report: StepReport
) -> Summary:
    """The summary of one step over all ranks. If `join` was called without `agree`, `ranks` contains only rank 0, so
    the loss is that of rank 0.
    """
    slowest = max(rank.step_ms for rank in ranks)
    tokens = _tokens(ranks)
    loads = [load for load in report.experts.values() if sum(load)]
    mfus = [rank.mfu for rank in ranks if rank.mfu is not None]
    return Summary(
        step=step.step,
        revision=step.revision,
        time_s=time.time(),
        loss=_mean_loss(ranks),
        grad_norm=_largest([rank.grad_norm for rank in ranks if rank.grad_norm is not None]),
        step_ms=slowest,
        tokens_per_s=1e3 * tokens / slowest if everyone and tokens is not None and slowest else None,
        mfu=sum(mfus) / len(mfus) if everyone and mfus else None,
        bubble=None,
        bubble_bound=None,
        oversubscribed=False,
        a2a_bytes=None,
        comm={},
        dropped=sum(report.dropped.values()) if report.dropped else None,
        load_max_over_mean=max((len(load) * max(load) / sum(load) for load in loads), default=None),
        knobs=dict(values),
        lr=report.finite("lr"),
        skipped=any(rank.skipped for rank in ranks),
        loss_scale=report.finite("loss_scale"),
        not_finite=_not_finite(ranks),
    )


def _mean_loss(ranks: Sequence[RankStep]) -> float | None:
    """The mean of the losses of `ranks`, weighted by `weight` or else by tokens; unweighted if a weight is unknown. A
    rank with the weight 0 does not count, because 0 times NaN would be NaN."""
    losses = [
        (rank.loss, rank.tokens if rank.weight is None else rank.weight)
        for rank in ranks
        if rank.loss is not None
    ]
    if any(weight is None for _, weight in losses):
        losses = [(loss, 1) for loss, _ in losses]
    counted = [(loss, weight) for loss, weight in losses if weight is not None and weight > 0]
    total = sum(weight for _, weight in counted)
    return sum(loss * (weight / total) for loss, weight in counted) if counted else None


def _largest(values: Sequence[float]) -> float | None:
    """The maximum; NaN if a value is NaN, which `max` may ignore; None without values."""
    return next((value for value in values if math.isnan(value)), max(values, default=None))


def _tokens(ranks: Sequence[RankStep]) -> int | None:
    """The number of tokens on which the job trains; ranks of the same `batch` have the same tokens, which count
    once."""
    batches: dict[object, int] = {}
    for number, rank in enumerate(ranks):
        if rank.tokens is not None:
            batch = number if rank.batch is None else tuple(rank.batch)
            batches[batch] = max(batches.get(batch, 0), rank.tokens)
    return sum(batches.values()) if batches else None


def _not_finite(ranks: Sequence[RankStep]) -> list[int]:
    """The ranks whose loss is not finite or, if there are none, whose gradient norm is not finite. A NaN in one rank's
    loss reaches the gradients of all ranks."""
    for values in ([rank.loss for rank in ranks], [rank.grad_norm for rank in ranks]):
        found = [at for at, value in enumerate(values) if value is not None and not math.isfinite(value)]
        if found:
            return found[:RANKS_NAMED]
    return []
