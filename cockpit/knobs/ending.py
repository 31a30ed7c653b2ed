"""Text of the dialog that confirms the end of a run: how many steps since the last checkpoint would be lost."""

from cockpit.data import format
from cockpit.data.log.run_log import newest_checkpoint
from cockpit.data.store import Store
from cockpit.knobs import values


def unsaved_steps_text(store: Store) -> str:
    """Says how many steps the run has done, and how many of them would be lost."""
    done = store.steps_done or 0
    planned = store.steps_planned
    of = f" of {format.grouped(planned)}" if planned else ""
    return f"{store.run} has done {format.grouped(done)}{of} steps. {_lost(store, done)}"


def _lost(store: Store, done: int) -> str:
    if store.simulated:
        return "It is simulated: the same command does the same steps again."
    if saves_at_its_end(store):
        return "The run saves a checkpoint before it ends, so no step is lost."
    at = newest_checkpoint(store)
    if at is None:
        return "It has no checkpoint: all steps would be lost."
    if at >= done:
        return f"The checkpoint of step {format.grouped(at)} holds all of them."
    steps = "step" if done - at == 1 else f"{format.grouped(done - at)} steps"
    return f"The newest checkpoint is of step {format.grouped(at)}: the {steps} since then would be lost."


def saves_at_its_end(store: Store) -> bool:
    """Whether the run itself saves a checkpoint before it ends."""
    return (store.number("checkpoint_every") or 0) > 0


def can_save(store: Store) -> bool:
    """Whether to offer the operator a checkpoint before the run ends: the run can save one on request, and does not
    save one by itself at its end."""
    board = store.state.board
    save = next((knob for knob in board.knobs if knob.name == "save"), None) if board else None
    return save is not None and values.only_value(save) is not None and not saves_at_its_end(store)
