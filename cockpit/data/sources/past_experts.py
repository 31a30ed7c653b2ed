"""Reads the history of the expert load from a recording.

A hub sends a new client only the newest record. The earlier records, which show since which step an expert has been
dead, are in the recording.
"""

from collections.abc import Callable

from agents.protocol import Experts, Loads
from agents.recording.detail import records_before
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from cockpit.data.history.experts import ExpertHistory

KINDS = frozenset({"experts", "loads"})
# Maximum size of the compressed rows. Reading them takes about 2 s; a run of 8 ranks writes as much in a few hours.
MOST_BYTES = 16 << 20


def add_past(
    history: ExpertHistory,
    recording: Recording,
    epoch: str,
    seq: int,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Append to `history` the recorded loads of the steps after its last step, up to the update with sequence number
    `seq` of the hub process `epoch`."""
    after = history.loads[-1].last if len(history.loads) else -1
    for update in records_before(recording, KINDS, epoch, seq, after, MOST_BYTES, cancelled):
        if isinstance(update, Experts | Loads):
            newest = history.loads if isinstance(update, Experts) else history.figures
            if not len(newest) or update.step > newest[-1].last or after < 0:
                history.add(update)


def history_at(
    replay: Replay, known: ExpertHistory, cancelled: Callable[[], bool] = lambda: False
) -> ExpertHistory | None:
    """The history of the expert load at the position of `replay`, derived from `known`, the history at another position
    of the same recording. Returns None if `cancelled` returned true."""
    state, history = replay.state, known.copy()
    here = max((record.step for record in (state.experts, state.loads) if record), default=None)
    if here is None:
        return ExpertHistory()
    history.cut(here + 1)
    add_past(history, replay.recording, replay.epoch, replay.seq, cancelled)
    return None if cancelled() else history
