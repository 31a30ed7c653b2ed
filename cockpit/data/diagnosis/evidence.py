"""The measurements of a run from which the planner determines its bottleneck."""

from agents.state.preview_checks import Trust, trust
from cockpit.data.metrics import median
from cockpit.data.store import Store, Topic
from engine.planner.advice import Evidence


def evidence(store: Store) -> Evidence | None:
    """Measurements for the planner's advice, from the newest step of each rank and the newest summary; None before the
    first step."""
    return store.once("evidence", (Topic.RANKS, Topic.CURVES), lambda: _evidence(store))


def _evidence(store: Store) -> Evidence | None:
    steps = list(store.state.steps.values())
    step_ms, summary = median(step.step_ms for step in steps), store.summary
    if not step_ms:
        return None
    axes = {axis for step in steps for axis in step.comm}
    phases = {phase for step in steps for phase in step.phases}
    exposed = {
        axis: median(step.comm[axis].exposed_ms for step in steps if axis in step.comm) for axis in axes
    }
    each = {phase: median(step.phases[phase] for step in steps if phase in step.phases) for phase in phases}
    micro_batches = summary.knobs.get("micro_batches") if summary else None
    return Evidence(
        step_ms,
        {phase: ms or 0.0 for phase, ms in each.items()},
        {axis: ms or 0.0 for axis, ms in exposed.items()},
        summary.bubble if summary else None,
        summary.bubble_bound if summary else None,
        summary.load_max_over_mean if summary else None,
        _memory_share(store),
        micro_batches if isinstance(micro_batches, int) else None,
    )


def _memory_share(store: Store) -> float | None:
    shares = [
        vitals.device_memory_bytes / vitals.device_memory_total
        for vitals in store.state.vitals.values()
        if vitals.device_memory_bytes is not None and vitals.device_memory_total
    ]
    return max(shares, default=None)


def trusted(store: Store) -> dict[str, Trust]:
    """The accuracy of past previews for each quantity, from the preview checks in the run's log."""
    return store.once("trust", (Topic.EVENTS,), lambda: trust(store.state.events))


def trust_text(found: Trust | None) -> str:
    """The accuracy of previews as text, such as ``9/10 inside, error 4 %``: 9 of 10 measured values were inside the
    predicted interval. "" if no preview has been checked."""
    if found is None:
        return ""
    return f"{found.hits}/{found.checks} inside, error {100 * found.mean_error:.0f} %"
