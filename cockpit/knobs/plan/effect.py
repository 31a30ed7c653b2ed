"""Measured values of a run, and the estimated effects of hypothetical changes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agents.protocol import Estimate
from cockpit.data.metrics import median
from cockpit.data.store import Store, Topic

if TYPE_CHECKING:
    from cockpit.knobs.plan.outlook import Outlook

CLOSED_FORM = "closed form"
ROUNDING = 1e-3  # relative difference of bytes that comes from rounding shards to whole rows
FROM_STEP = "planned: from the step time"


@dataclass(frozen=True)
class RankMemory:
    """The measured memory of the rank that uses the most memory among the ranks with the same pp coordinate. `step`:
    the memory in bytes that the rank reported for its newest step; `device`: bytes in use on its device, by all
    processes."""

    rank: int
    step: int | None
    device: int | None = None


def measured_memory(store: Store) -> dict[int, RankMemory]:
    """For each pp coordinate, the memory of the rank that used the most memory in its newest step."""
    return store.once("plan.memory", (Topic.RANKS, Topic.GRID), lambda: _measured_memory(store))


def _measured_memory(store: Store) -> dict[int, RankMemory]:
    found: dict[int, RankMemory] = {}
    for rank, step in store.state.steps.items():
        hello, size = store.state.hellos.get(rank), step.memory_bytes
        if hello is None or size is None:
            continue
        pp = hello.coords.get("pp", 0)
        worst = found.get(pp)
        if worst is None or size > (worst.step or 0):
            vitals = store.state.vitals.get(rank)
            found[pp] = RankMemory(rank, size, vitals.device_memory_bytes if vitals else None)
    return found


def sent_bytes(store: Store) -> dict[str, float]:
    """Bytes that rank 0 sent in its newest step, by axis."""
    step = store.state.steps.get(0)
    return {axis: float(lane.bytes) for axis, lane in step.comm.items() if axis != "control"} if step else {}


def estimates(store: Store, now: "Outlook", after: "Outlook") -> list[Estimate]:
    """The estimated effect of a change on step time, throughput, MFU, bubble, memory and bytes sent. `now` and `after`:
    the planner's predictions for the run without and with the change."""
    return [*_times(store, now, after), *_bubbles(store, now, after), *_sizes(now, after)]


def _times(store: Store, now: "Outlook", after: "Outlook") -> list[Estimate]:
    measured = median(summary.step_ms for summary in store.state.summaries[-32:])
    if now.step_s is None or after.step_s is None:
        return [Estimate("step_ms", measured, source=f"no data: {after.why}")]
    before_s, span, source = now.step_s.likely, after.step_s, f"planned: {after.source}"
    found = [Estimate("step_ms", 1e3 * before_s, 1e3 * span.likely, 1e3 * span.low, 1e3 * span.high, source)]
    if span.low > 0:
        likely, low, high = (after.tokens / seconds for seconds in (span.likely, span.high, span.low))
        found.append(Estimate("tokens_per_s", now.tokens / before_s, likely, low, high, FROM_STEP))
        if now.mfu and after.mfu:
            summary = store.summary
            was = summary.mfu if summary and summary.mfu else now.mfu
            likely = after.mfu * was / now.mfu
            low, high = (likely * span.likely / seconds for seconds in (span.high, span.low))
            found.append(Estimate("mfu", was, likely, low, high, FROM_STEP))
    return found


def _bubbles(store: Store, now: "Outlook", after: "Outlook") -> list[Estimate]:
    if now.bound is None and after.bound is None:
        return []
    if now.bubble is None and after.bubble is None:
        source = f"{CLOSED_FORM}: idle share of the schedule with equal stages"
        return [Estimate("bubble_bound", now.bound or 0.0, after.bound or 0.0, source=source)]
    planned, then = now.bubble or 0.0, after.bubble or 0.0
    summary = store.summary
    if summary is None or summary.bubble is None:
        return [Estimate("bubble", planned, then, source="planned")]
    likely = min(1.0, max(0.0, summary.bubble + then - planned))
    return [Estimate("bubble", summary.bubble, likely, source="planned change of the measured bubble")]


def _sizes(now: "Outlook", after: "Outlook") -> list[Estimate]:
    worst = after.memory.ranks[after.memory.worst_rank]
    source = f"{CLOSED_FORM}: pipeline rank {after.memory.worst_rank}, most of it {worst.largest}"
    found = [Estimate("peak_bytes", now.memory.peak, after.memory.peak, source=source)]
    for axis in {**now.bytes, **after.bytes}:
        before, then = now.bytes.get(axis, 0.0), after.bytes.get(axis, 0.0)
        if abs(then - before) < ROUNDING * before:
            then = before
        if before or then:
            found.append(
                Estimate(f"{axis}_bytes", before, then, source=f"{CLOSED_FORM}: sent by rank 0 in a step")
            )
    return found
