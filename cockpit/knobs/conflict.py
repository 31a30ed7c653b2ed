"""Conflicts between unsent edits and changes by other operators: who changed what since the first edit."""

from agents.protocol import MOVED_ON, PENDING_CHANGE, CommandState
from cockpit.data import format
from cockpit.data.store import Store


def refused_as_stale(command: CommandState) -> bool:
    """Whether the hub refused a proposal because another change came first."""
    return command.state == "rejected" and command.why.startswith((MOVED_ON, PENDING_CHANGE))


def changes_since(store: Store, revision: int) -> str:
    """The changes after `revision` with their authors, as text such as ``ada@login set lr_scale 0.5 (r5)``."""
    newer = [
        one
        for one in store.state.commands.values()
        if one.revision > revision and one.state in ("accepted", "applied")
    ]
    words = [_words(one) for one in sorted(newer, key=lambda one: one.revision)]
    return " and ".join(words) or f"someone changed the board after revision {revision}"


def _words(command: CommandState) -> str:
    changes = ", ".join(
        f"{format.clean(name)} {format.knob(value)}" for name, value in command.changes.items()
    )
    return f"{format.clean(command.who) or 'someone'} set {changes} (r{command.revision})"
