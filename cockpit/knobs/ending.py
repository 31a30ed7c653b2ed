"""What the end of a run loses, in a sentence for who is asked whether to end it. Textual-free."""

from agents.protocol import CHECKPOINT_STEP
from cockpit.data import format
from cockpit.data.store import Store
from cockpit.knobs import values


def at_stake(store: Store) -> str:
    """How far the run is, and how much of that no checkpoint holds."""
    done = 0 if store.step is None else store.step + 1  # steps are counted from 0
    planned = store.steps_planned
    of = f" of {format.grouped(planned)}" if planned else ""
    return f"{store.run} has done {format.grouped(done)}{of} steps. {_lost(store, done)}"


def _lost(store: Store, done: int) -> str:
    if saves_at_its_end(store):
        return "It saves a last checkpoint before it ends: nothing is lost."
    at = newest_checkpoint(store)
    if at is None:
        return "There is no checkpoint of it: all of that is lost."
    if at >= done:
        return f"The checkpoint of step {format.grouped(at)} holds all of that."
    steps = "step since is" if done - at == 1 else f"{format.grouped(done - at)} steps since are"
    return f"Its newest checkpoint is of step {format.grouped(at)}: the {steps} lost."


def newest_checkpoint(store: Store) -> int | None:
    """Steps that had been done when the newest checkpoint was saved, as the run has told; None: it told of none."""
    told = (event.facts.get(CHECKPOINT_STEP) for event in reversed(store.state.events))
    return next((step for step in told if isinstance(step, int)), None)


def saves_at_its_end(store: Store) -> bool:
    return (store.number("checkpoint_every") or 0) > 0


def can_save(store: Store) -> bool:
    """Whether a checkpoint can be asked for before the end, and would add anything."""
    board = store.state.board
    save = next((knob for knob in board.knobs if knob.name == "save"), None) if board else None
    return save is not None and values.only(save) is not None and not saves_at_its_end(store)
