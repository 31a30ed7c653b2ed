"""What became of a proposal or a trial, in a line. Textual-free."""

from agents.protocol import CommandState, TrialState
from cockpit.data import format


def changes_text(command: CommandState) -> str:
    """``micro_batches 4→8, recompute none→full``."""
    if not command.changes:
        return "undo"  # of which the hub found nothing to take back
    return ", ".join(
        f"{format.clean(name)} {format.change(command.before[name], after)}"
        if name in command.before
        else f"{format.clean(name)}={format.knob(after)}"
        for name, after in command.changes.items()
    )


def taken_back(command: CommandState) -> str:
    """What an undo of `command` changes: ``micro_batches 8→4``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(command.changes.get(name), value)}"
        for name, value in command.before.items()
    )


def command_text(command: CommandState) -> str:
    """What became of a proposal, in a line."""
    said = f"{changes_text(command)} · {command.state}"
    if command.state == "applied":
        said += f" {command.acks}/{command.world} at step {format.grouped(command.applied_step)}"
    if command.revision:
        said += f" · revision {command.revision}"
    if command.undoes:
        said += f", which takes back {command.undoes}"
    said += f" · {format.clean(command.why)}" if command.why else ""
    return f"{said} · “{format.clean(command.reason)}”" if command.reason else said


def tried(trial: TrialState) -> str:
    """``micro_batches 4→8``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(trial.before.get(name), value)}"
        for name, value in trial.changes.items()
    )


def how_far(trial: TrialState) -> str:
    """``after 12/30``: the window that is being measured; else what the trial is doing."""
    if trial.state in ("before", "after"):
        return f"{trial.state} {trial.measured}/{trial.steps}"
    return trial.state


def ratio_text(trial: TrialState) -> str:
    """``-8.3% (95 %: -10.1% to -6.2%)``, of step times; nothing before the verdict."""
    if trial.ratio is None or trial.low is None or trial.high is None:
        return ""
    return f"{trial.ratio - 1:+.1%} (95 %: {trial.low - 1:+.1%} to {trial.high - 1:+.1%})"


def trial_text(trial: TrialState) -> str:
    """How a trial stands, in a line."""
    said = f"trial {tried(trial)} · {trial.state}"
    if found := ratio_text(trial):
        said += f" · step time {found} over {trial.steps} steps"
    elif not trial.settled:
        said += f" · {trial.measured}/{trial.steps} steps"
    return f"{said} · {format.clean(trial.why)}" if trial.why else said
