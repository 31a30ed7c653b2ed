"""The final summary of a run: steps, time, lowest and last loss, and the effect of each change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agents.protocol import CommandState, Hello, TrialState
from cockpit.data import format
from cockpit.data.diagnosis.status import SIMULATED
from cockpit.data.link import LinkState
from cockpit.data.log.outcomes import Brought, brought, brought_text, changes_text, ratio_text, trial_changes
from cockpit.data.log.run_log import newest_checkpoint
from cockpit.data.store import Store

MOST_CHANGES = 12  # maximum number of listed changes; the newest are listed


@dataclass(frozen=True)
class Change:
    """A knob change that was applied, or a trial that has ended, and its effect."""

    text: str
    step: int | None
    who: str
    outcome: str  # its effect in words; "" if too few steps are known
    brought: tuple[Brought, ...] = ()


@dataclass(frozen=True)
class FinalSummary:
    """The number of steps that a run has done, its wall time, its last and lowest loss, and its knob changes. Unknown
    values are None."""

    run: str
    simulated: bool
    link: LinkState
    steps: int | None  # number of steps done
    planned: int | None
    wall_s: float | None  # since the ranks first began to train
    loss: float | None
    lowest: tuple[int, float] | None  # step and value of the lowest loss
    checkpoint: int | None  # steps done at the newest checkpoint
    changes: tuple[Change, ...]
    earlier_changes: int  # number of changes that are not listed


def has_ended(store: Store) -> bool:
    """Whether the run has ended or failed, after at least one step."""
    return store.link in (LinkState.ENDED, LinkState.FAILED) and store.step is not None


def final_summary(store: Store) -> FinalSummary:
    """The summary of the run in `store`, even if the run has not ended."""
    state = store.state
    losses = [(at, value) for at, value in state.points("loss") if math.isfinite(value)]
    lowest = min(losses, key=lambda point: point[1], default=None)
    changes = list(_changes(store))
    return FinalSummary(
        run=store.run,
        simulated=store.simulated,
        link=store.link,
        steps=store.steps_done,
        planned=store.steps_planned,
        wall_s=_wall_s(store),
        loss=store.summary.loss if store.summary else None,
        lowest=lowest,
        checkpoint=newest_checkpoint(store),
        changes=tuple(changes[-MOST_CHANGES:]),
        earlier_changes=max(0, len(changes) - MOST_CHANGES),
    )


def began_s(leader: Hello | None) -> float | None:
    """When the ranks first began to train, in seconds since the epoch by the hub's clock. Restarts by the launcher, as
    after a change of the layout, do not change it. None if it is unknown."""
    return leader.began_s - leader.earlier_s if leader and leader.began_s else None


def _wall_s(store: Store) -> float | None:
    start_s = began_s(next((hello for hello in store.state.hellos.values() if hello.leader), None))
    if start_s is None or store.summary is None:
        return None
    wall_s = store.summary.time_s - start_s
    return wall_s if wall_s > 0 else None


def _changes(store: Store) -> Iterator[Change]:
    """Applied knob changes and trials that have ended (without failed ones), oldest first. A change made by a trial is
    not listed separately."""
    trials = [trial for trial in store.state.trials.values() if trial.settled and trial.state != "failed"]
    tried = {trial.revision for trial in trials}
    commands = [
        one
        for one in store.state.commands.values()
        if one.state == "applied" and one.changes and one.revision not in tried
    ]
    both: list[tuple[int, Change]] = [(one.revision, _of_command(store, one)) for one in commands]
    both += [(one.revision, _of_trial(one)) for one in trials]
    yield from (change for _, change in sorted(both, key=lambda pair: pair[0]))


def _of_command(store: Store, command: CommandState) -> Change:
    found = brought(store.state, command)
    outcome = "; ".join(brought_text(one) for one in found)
    return Change(
        changes_text(command), command.applied_step, format.clean(command.who), outcome, tuple(found)
    )


def _of_trial(trial: TrialState) -> Change:
    ratio = ratio_text(trial)
    outcome = f"{trial.state}, step time {ratio}" if ratio else trial.state
    return Change(f"trial {trial_changes(trial)}", None, format.clean(trial.who), outcome)


def duration_text(seconds: float) -> str:
    """A duration as text, such as ``41 s``, ``12 min 5 s``, ``3 h 20 min`` or ``2 d 4 h``."""
    whole = round(seconds)
    for size, unit, smaller, small_unit in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"


def outcome_rows(found: FinalSummary) -> Iterator[tuple[str, str]]:
    """The summary as (label, text) pairs; the knob changes come last."""
    of = f" of {format.grouped(found.planned)}" if found.planned else ""
    yield "steps", f"{format.grouped(found.steps)}{of}"
    yield "wall time", format.MISSING if found.wall_s is None else duration_text(found.wall_s)
    loss = format.MISSING if found.loss is None else f"{found.loss:.4f}"
    if found.lowest:
        step, value = found.lowest
        loss += f", lowest {value:.4f} at step {format.grouped(step)}"
    yield "loss", loss
    saved = "none" if found.checkpoint is None else f"of step {format.grouped(found.checkpoint)}"
    if not found.simulated:
        yield "checkpoint", saved
    if not found.changes:
        yield "changes", "none"
    if found.earlier_changes:
        yield "changes", f"{found.earlier_changes} earlier ones are in the log"
    for number, change in enumerate(found.changes):
        where = f" at step {format.grouped(change.step)}" if change.step is not None else ""
        by = f" by {change.who}" if change.who else ""
        outcome = change.outcome or "too few steps to measure its effect"
        label = "" if number or found.earlier_changes else "changes"
        yield label, f"{change.text}{where}{by}: {outcome}"


def title(found: FinalSummary) -> str:
    """The title, such as ``demo has ended``, with a label if the run is simulated."""
    mark = f"{SIMULATED} " if found.simulated else ""
    return f"{mark}{found.run} {_ENDS.get(found.link, _STOPPED)}"


_ENDS = {LinkState.ENDED: "has ended", LinkState.FAILED: "has failed"}
_STOPPED = "was stopped; the last state that reached this cockpit:"


def plain_summary(found: FinalSummary) -> dict[str, Any]:
    """The JSON object that ``--json`` prints for the final summary."""
    return {
        "steps": found.steps,
        "planned": found.planned,
        "wall_s": found.wall_s,
        "loss": found.loss,
        "lowest_loss": found.lowest[1] if found.lowest else None,
        "lowest_loss_step": found.lowest[0] if found.lowest else None,
        "checkpoint_step": found.checkpoint,
        "changes": [
            {
                "text": change.text,
                "step": change.step,
                "who": change.who,
                "outcome": change.outcome or None,
                "brought": [
                    {
                        "quantity": one.quantity,
                        "before": one.before,
                        "after": one.after,
                        "predicted_low": one.low,
                        "predicted_high": one.high,
                        "source": one.source,
                    }
                    for one in change.brought
                ],
            }
            for change in found.changes
        ],
        "earlier_changes": found.earlier_changes,
    }
