"""Iterates over the updates of a recording, each exactly once; used by all exports."""

from collections.abc import Iterator

from agents.protocol import Hello, Update, codec
from agents.recording.reader import Moment, Recording
from agents.state.run_state import RunState


def updates(recording: Recording) -> Iterator[tuple[Moment, Update]]:
    """Every update of a recording, with the moment at which it was recorded. After a gap, a recording contains a
    snapshot of the run; an update in this snapshot is skipped if it was already part of the state before the gap.
    """
    state = RunState()
    place = ("", 0)
    for moment in recording.moments():
        if moment.snapshot is not None:
            if moment.epoch != place[0]:
                state = RunState()
            elif moment.seq <= place[1] or not moment.snapshot:
                continue
            known = set(map(codec.pack, state.replay()))
            for update in moment.snapshot:
                state.apply(update)
                if codec.pack(update) not in known:
                    yield moment, update
        elif moment.update is not None:
            state.apply(moment.update)
            yield moment, moment.update
        place = (moment.epoch, moment.seq)


def simulated(recording: Recording) -> bool:
    """Whether the recorded run was simulated. Every export labels the data of a simulated run as simulated."""
    hello = next((update for _, update in updates(recording) if isinstance(update, Hello)), None)
    return hello is not None and hello.simulated
