"""Draws, as lines of text, the outcomes of the newest proposal, of a trial, and of the newest knob changes."""

from agents.protocol import CommandState, TrialState
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.log.outcomes import brought, brought_text, changes_text, ratio_text, trial_changes
from cockpit.data.store import Store, Topic
from cockpit.knobs.controller import undoable
from cockpit.tui.drawing.strips import StripLine, bar, rule
from cockpit.tui.drawing.theme import Palette

OUTCOME = {
    "accepted": Level.NOTE,
    "applied": Level.GOOD,
    "rejected": Level.BAD,
    "expired": Level.WARN,
    "rolled_back": Level.WARN,
}
VERDICT = {"kept": Level.GOOD, "reverted": Level.NOTE, "failed": Level.BAD}
TRIAL = 3  # lines
BROUGHT = 2  # quantities of a change

# Text for each state of a running trial.
_STATE_TEXT = {
    "before": "measuring the current value, then the new one",
    "applying": "applying the new value: waiting for a step boundary",
    "after": "measuring the new value; reverted unless clearly faster",
    "reverting": "reverting",
}
_NEEDS_OPERATOR = (
    "measuring the new value; it changes the loss, so it is reverted unless an operator keeps it"
)


def progress(command: CommandState | None, colours: Palette) -> StripLine:
    """The progress of a proposal: sent, accepted, applied n/n, or refused with the reason."""
    line = StripLine().add("  ", colours.text)
    if command is None:
        return line.add("sent · waiting for the hub", colours.dim)
    level = OUTCOME[command.state]
    line.add(f"{level.value} {command.state} ", colours.level[level])
    if command.state in ("rejected", "expired", "rolled_back"):
        return line.add(format.clean(command.why), colours.text)
    share = command.acks / command.world if command.world else 0.0
    line.add(bar(share, 12).replace(" ", "░"), colours.accent)
    line.add(f" {command.acks:>{len(str(command.world))}}/{command.world}", colours.strong)
    at = (
        "waiting for a step boundary"
        if command.applied_step is None
        else f"at step {format.grouped(command.applied_step)}"
    )
    line.add(f" {at} · revision {command.revision}", colours.dim)
    return line.add(f", which reverts {command.undoes}" if command.undoes else "", colours.dim)


def trial_lines(trial: TrialState, width: int, colours: Palette) -> list[StripLine]:
    """Three lines about a trial: the changed knob, the measurements before and after the change, and the state or the
    result."""
    by = f" · by {format.clean(trial.who)}" if trial.who else ""
    head = rule(f"Trial · {trial_changes(trial)}{by}", width, colours.text, colours.line)
    return [head, _measured(trial, width, colours), _verdict(trial, width, colours)]


def _measured(trial: TrialState, width: int, colours: Palette) -> StripLine:
    """The line with the measurements before and after the change: how many steps are measured, and their step time."""
    cells = 14 if width >= 90 else 8
    before = trial.measured if trial.state == "before" else trial.steps
    after = trial.measured if trial.state == "after" or trial.after_ms is not None else 0
    if trial.settled and trial.before_ms is None:
        before = trial.measured
    line = StripLine().add("  ", colours.text)
    for name, steps, ms in (("before", before, trial.before_ms), ("   after", after, trial.after_ms)):
        line.add(f"{name} ", colours.dim).add(_cells(steps / trial.steps, cells), colours.accent)
        line.add(f" {steps:>{len(str(trial.steps))}}/{trial.steps}", colours.strong)
        line.add("" if ms is None else f" {format.duration_ms(ms)}", colours.text)
    return line


def _cells(share: float, cells: int) -> str:
    return bar(share, cells).replace(" ", "░")


def _verdict(trial: TrialState, width: int, colours: Palette) -> StripLine:
    line = StripLine().add("  ", colours.text)
    if trial.state == "after" and not trial.loss_neutral:
        return line.add(f"! {_NEEDS_OPERATOR}", colours.level[Level.WARN])
    if not trial.settled:
        why = f": {format.clean(trial.why)}" if trial.why else ""
        return line.add(f"{Level.NOTE.value} {_STATE_TEXT[trial.state]}{why}", colours.dim)
    level = VERDICT[trial.state]
    line.add(f"{level.value} {trial.state}", colours.level[level])
    found, name = ratio_text(trial), "step time " if width >= 90 else ""
    line.add(f" · {name}{found}" if found else "", colours.strong)
    return line.add(f" · {format.clean(trial.why)}" if trial.why else "", colours.text)


def newest_lines(store: Store, height: int, width: int, colours: Palette) -> list[StripLine]:
    """Lines with a heading and the run's newest proposals. The change that an undo would revert is marked."""
    if height < 2 or not store.state.commands:
        return []
    newest = sorted(store.state.commands.values(), key=lambda command: command.time_s, reverse=True)
    next_undone = undoable(store)
    lines = [rule("Changes", width, colours.dim, colours.line)]
    for command in newest:
        if len(lines) >= height:
            break
        lines.append(_outcome(command, command is next_undone, width, colours))
        lines += _brought_lines(store, command, width, colours)
    return lines[:height]


def _brought_lines(store: Store, command: CommandState, width: int, colours: Palette) -> list[StripLine]:
    """The effect of an applied knob change, compared with the effect that its preview predicted."""
    found = store.once(
        ("brought", command.id),
        (Topic.EVENTS, Topic.CURVES, Topic.BOARD),
        lambda: brought(store.state, command),
    )
    lines = []
    for one in found[:BROUGHT]:
        level = {True: Level.GOOD, False: Level.WARN, None: Level.NOTE}[one.inside]
        line = StripLine().add("         ", colours.text).add(f"{level.value} ", colours.level[level])
        effect, source = (f"effect {brought_text(one)}", colours.text), (f" · {one.source}", colours.faint)
        lines.append(line.add(*effect).add_fitting(width, [source]))
    return lines


def _outcome(command: CommandState, undone_next: bool, width: int, colours: Palette) -> StripLine:
    level = OUTCOME[command.state]
    line = StripLine().add(f"  {level.value} ", colours.level[level])
    line.add(f"r{command.revision} ".ljust(5) if command.revision else "     ", colours.dim)
    line.add(changes_text(command), colours.text)
    items = []
    if command.applied_step is not None:
        at = f" · {command.acks}/{command.world} at step {format.grouped(command.applied_step)}"
        items.append((at, colours.dim))
    elif command.why:
        line.add(f" · {format.clean(command.why)}", colours.dim)
    items.append((f" · reverts r{command.undoes}" if command.undoes else "", colours.dim))
    items.append((" · undo reverts this" if undone_next else "", colours.accent))
    items.append((f" · {format.clean(command.who)}" if command.who else "", colours.faint))
    return line.add_fitting(width, *([item] for item in items))
