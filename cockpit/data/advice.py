"""What to try next, as far as this run has not shown that it does not help."""

from agents.protocol import TrialState
from cockpit.data.outcomes import ratio_text, tried
from cockpit.data.store import Store


def more_micro_batches(store: Store, now: int) -> str:
    """What to do about a bubble, with `now` micro-batches in force."""
    refuted = [trial for trial in store.state.trials.values() if _refutes_more(trial, now)]
    if refuted:
        trial = refuted[-1]
        return f"a trial of {tried(trial)} was not faster: step time {ratio_text(trial)}"
    board = store.state.board
    legal = (
        next((knob.legal for knob in board.knobs if knob.name == "micro_batches"), None) if board else None
    )
    more = [one for one in legal.choices if isinstance(one, int) and one > now] if legal else []
    if legal and not more:
        return "no larger number is legal here"
    return f"cockpit try micro_batches={min(more)} measures whether more helps" if more else "try more"


def _refutes_more(trial: TrialState, now: int) -> bool:
    """It measured a larger number beside this one, and the number was taken back."""
    name, tried_with = "micro_batches", trial.changes.get("micro_batches")
    beside = set(trial.changes) == {name} and trial.before.get(name) == now
    more = isinstance(tried_with, int) and tried_with > now
    return beside and more and trial.state == "reverted" and trial.ratio is not None
