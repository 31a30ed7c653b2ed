"""A simulated run with a recorder but without a hub."""

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Update, codec
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_hello, make_step, make_summary


def digest(state: RunState) -> list[bytes]:
    """The encoded messages of the whole state, sorted so that the order in which ranks connected does not matter."""
    return sorted(map(codec.pack, state.replay()))


class Run:
    """An update log and the recorder that records it; the test adds steps to the log."""

    def __init__(self, path: Path, limits: Limits, update_log: UpdateLog | None = None) -> None:
        self.path = path
        self.update_log = update_log or UpdateLog()
        self.recorder = Recorder(path, self.update_log, limits)
        self.states: dict[int, list[bytes]] = {}
        self.step = -1

    def tell(self, *updates: Update) -> None:
        for update in updates:
            self.update_log.publish(update)
            self.states[self.update_log.seq] = digest(self.update_log.state)
        self.recorder.follow()

    def begin(self) -> None:
        self.tell(*(make_hello(rank, 4) for rank in range(4)))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.tell(*(make_step(rank, self.step) for rank in range(4)), make_summary(self.step))

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline
            self.recorder.follow()
            time.sleep(0.005)

    def written(self) -> bool:
        """Whether the newest update is on disk."""
        try:
            with closing(Recording(self.path)) as recording:
                return recording.span().last_seq == self.update_log.seq
        except RecordingError:
            return False

    @property
    def events(self) -> list[str]:
        return [event.text for event in self.update_log.state.events]


MakeRun = Callable[..., Run]


def opened(run: Run) -> Replay:
    run.recorder.close()
    return Replay(Recording(run.path))
