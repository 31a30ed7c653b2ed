"""One-line outcomes of proposals and trials. Textual-free."""

from agents.protocol import CommandState, TrialState
from cockpit.data import format


def changes_text(command: CommandState) -> str:
    """The changes of a command: ``micro_batches 4→8, recompute none→full``."""
    if not command.changes:
        return "undo"  # the hub found nothing to undo
    return ", ".join(
        f"{format.clean(name)} {format.change(command.before[name], after)}"
        if name in command.before
        else f"{format.clean(name)}={format.knob(after)}"
        for name, after in command.changes.items()
    )


def reverted_text(command: CommandState) -> str:
    """The changes that an undo of `command` makes: ``micro_batches 8→4``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(command.changes.get(name), value)}"
        for name, value in command.before.items()
    )


def command_text(command: CommandState) -> str:
    """The outcome of a proposal, in one line."""
    text = f"{changes_text(command)} · {command.state}"
    if command.state == "applied":
        text += f" {command.acks}/{command.world} at step {format.grouped(command.applied_step)}"
    if command.revision:
        text += f" · revision {command.revision}"
    if command.undoes:
        text += f", which reverts {command.undoes}"
    text += f" · {format.clean(command.why)}" if command.why else ""
    return f"{text} · “{format.clean(command.reason)}”" if command.reason else text


def trial_changes(trial: TrialState) -> str:
    """The changes of a trial: ``micro_batches 4→8``."""
    return ", ".join(
        f"{format.clean(name)} {format.change(trial.before.get(name), value)}"
        for name, value in trial.changes.items()
    )


def trial_progress(trial: TrialState) -> str:
    """Progress of a trial: ``after 12/30`` while it measures, else its state."""
    if trial.state in ("before", "after"):
        return f"{trial.state} {trial.measured}/{trial.steps}"
    return trial.state


def ratio_text(trial: TrialState) -> str:
    """Change of the step time: ``-8.3% (95 %: -10.1% to -6.2%)``; "" before the trial is decided."""
    if trial.ratio is None or trial.low is None or trial.high is None:
        return ""
    return f"{trial.ratio - 1:+.1%} (95 %: {trial.low - 1:+.1%} to {trial.high - 1:+.1%})"


def trial_text(trial: TrialState) -> str:
    """The state of a trial, in one line."""
    text = f"trial {trial_changes(trial)} · {trial.state}"
    if ratio := ratio_text(trial):
        text += f" · step time {ratio} over {trial.steps} steps"
    elif not trial.settled:
        text += f" · {trial.measured}/{trial.steps} steps"
    return f"{text} · {format.clean(trial.why)}" if trial.why else text
