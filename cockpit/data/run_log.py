"""The log of a run: events, commands and trials as lines, and the applied knob changes."""

from dataclasses import dataclass

from agents.protocol import CommandState, Event, TrialState
from cockpit.data import format
from cockpit.data.outcomes import changes_text, command_text, trial_text
from cockpit.data.store import Store, Topic


@dataclass(frozen=True)
class LogEntry:
    """One line of the log."""

    time_s: float
    level: str
    source: str
    text: str
    command: CommandState | None = None  # the command or trial that the line describes
    trial: TrialState | None = None


@dataclass(frozen=True)
class Mark:
    """An applied knob change, as drawn on a curve."""

    step: int
    label: str


def log_entries(store: Store) -> list[LogEntry]:
    """Events and the outcome of each command and trial, in the hub's order. Cached: callers must not change it."""
    return store.once(
        "log", (Topic.BOARD, Topic.EVENTS), lambda: [_entry(logged) for logged in store.state.log()]
    )


def _entry(logged: Event | CommandState | TrialState) -> LogEntry:
    match logged:
        case CommandState():
            level = "info" if logged.state in ("accepted", "applied") else "warning"
            return LogEntry(logged.time_s, level, format.clean(logged.who), command_text(logged), logged)
        case TrialState():
            level = "warning" if logged.state == "failed" else "info"
            return LogEntry(logged.time_s, level, format.clean(logged.who), trial_text(logged), trial=logged)
        case Event():
            return LogEntry(
                logged.time_s, logged.level, format.clean(logged.source), format.clean(logged.text)
            )


def marks(store: Store) -> list[Mark]:
    """The applied knob changes, oldest first."""
    applied = [command for command in store.state.commands.values() if command.state == "applied"]
    return [
        Mark(command.applied_step, changes_text(command))
        for command in sorted(applied, key=lambda command: command.revision)
        if command.applied_step is not None
    ]
