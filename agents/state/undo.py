"""Selects the change that an undo reverts."""

from collections.abc import Iterable

from agents.protocol import CommandState


def newest_undoable(commands: Iterable[CommandState]) -> CommandState | None:
    """The newest applied change that is not itself an undo and has not been undone; actions cannot be undone."""
    applied = sorted((one for one in commands if one.state == "applied"), key=lambda one: -one.revision)
    undone = {one.undoes for one in applied}
    return next(
        (one for one in applied if not one.undoes and one.revision not in undone and one.before), None
    )
