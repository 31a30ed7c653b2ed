"""A recording as a feed: a store is moved along it as it happened, faster, slower, or not at all."""

import queue
import threading
import time
from collections.abc import Callable

from agents.protocol import Event, Summary, clip
from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Moment, Position, Recording
from agents.recording.replay import Replay
from agents.requests import Request
from cockpit.data.sources.recorded import playing
from cockpit.data.sources.source import ViewerError, faults_told
from cockpit.data.store import Store

TICK_S = 0.05
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
NOTHING_S = 5.0  # a longer silence in the recording is passed over: a run may have rested for a night
JUMP = 0.05  # of the whole recording

Move = Callable[[Replay], None]


class Playback:
    """Plays `recording` into a store, from its beginning, or paused from the place `begin`. Nothing can be asked of
    a recording: `ask` refuses. What moves it may be called from any thread; one thread of ours carries it out."""

    operator = False
    owns_run = False

    def __init__(
        self, recording: Recording, target: str, speed: float = 1.0, begin: Position | None = None
    ) -> None:
        self.target = target
        self.speed = speed
        self.paused = begin is not None
        self._recording = recording
        self._begin = begin
        self._at_s = 0.0  # of the recording's time
        self._moves: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def clock(self) -> float:
        """The recording's time: a store in playback has no other."""
        return self._at_s

    def start(self, store: Store) -> None:
        self._thread = threading.Thread(target=self._run, args=(store,), name="cockpit-playback", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2.0)

    def ask(self, asked: Request) -> None:
        raise ViewerError("this is a recording: nothing of it can be asked or changed")

    # ---------------------------------------------------------------------------------------------- moving

    def toggle(self) -> None:
        """Pause, or play on; from the end, play it all again."""

        def move(replay: Replay) -> None:
            if self.paused and replay.ended:
                self._go(replay, self._recording.at_start())
            self.paused = not self.paused

        self._moves.put(move)

    def faster(self, by: int) -> None:
        """`by` places up the table of speeds, or down."""

        def move(_: Replay) -> None:
            nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
            self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + by))]

        self._moves.put(move)

    def step(self, by: int) -> None:
        """Pause one step of training on, or back."""

        def move(replay: Replay) -> None:
            self.paused = True
            if by > 0:
                replay.forward(_after_summary())
                self._at_s = replay.time_s
                return
            now = replay.state.summaries[-1].step if replay.state.summaries else 0
            try:
                self._go(replay, self._recording.at_step(now - 1))
            except RecordingError:  # that step is not in it
                self._go(replay, self._recording.at_start())

        self._moves.put(move)

    def jump(self, by: int) -> None:
        """Forwards or back by twentieths of the recording."""

        def move(replay: Replay) -> None:
            span = self._recording.span()
            to = self._at_s + by * JUMP * (span.last_s - span.first_s)
            to = min(span.last_s, max(span.first_s, to))
            self._go(replay, self._recording.at_time(to))
            self._at_s = to

        self._moves.put(move)

    def ends(self, by: int) -> None:
        """To the beginning, or to the end of what is recorded by now."""
        at = self._recording.at_end if by > 0 else self._recording.at_start
        self._moves.put(lambda replay: self._go(replay, at()))

    def _go(self, replay: Replay, place: Position) -> None:
        replay.seek(place)
        self._at_s = replay.time_s

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self, store: Store) -> None:
        with faults_told(store, f"cockpit replay {self.target} opens it again"):
            try:
                self._play(store)
            except RecordingError as error:
                with store.lock:
                    store.trouble = str(error)
            finally:
                self._recording.close()

    def _play(self, store: Store) -> None:
        replay = Replay(self._recording, store.lock)
        self._go(replay, self._begin or self._recording.at_start())
        resets = -1
        span = self._recording.span()
        looked = time.monotonic()
        detailed, noted = -1, 0
        while not self._stop.is_set():
            moved = self._moved(replay)
            now = time.monotonic()
            elapsed, looked = min(now - looked, 1.0), now
            came = []
            if not self.paused:
                self._at_s += elapsed * self.speed
                if (next_s := replay.next_s) is not None and next_s - self._at_s > NOTHING_S:
                    self._at_s = next_s
                came = replay.forward(lambda moment: moment.time_s > self._at_s)
                if replay.ended:
                    self.paused, self._at_s = True, replay.time_s
            with store.lock:
                if moved or replay.resets != resets:
                    resets = replay.resets
                    if moved:
                        store.recent.clear()
                    store.adopt(replay.state)
                    noted = 0
                    span = self._recording.span()
                else:
                    store.note(came)
                damage = self._recording.damage
                for text in damage[noted:]:
                    store.apply([Event(self._at_s, "error", "recording", clip(f"this is not all: {text}"))])
                noted = len(damage)
                store.heard(0.0)
                view = store.view if store.detail is None or detailed != resets else None
                store.playing = playing(replay, span.first_s, span.last_s, self.speed, self.paused)
            if view:
                detailed = resets
                detail = curve_between(self._recording, *view, replay.epoch, replay.seq)
                with store.lock:
                    store.set_detail(view, detail)

    def _moved(self, replay: Replay) -> bool:
        """Do what is asked, or wait a moment; True if the place is another."""
        place = replay.resets, replay.epoch, replay.seq
        try:
            move = self._moves.get(timeout=TICK_S)
            while True:
                move(replay)
                move = self._moves.get_nowait()
        except queue.Empty:
            return (replay.resets, replay.epoch, replay.seq) != place


def _after_summary() -> Callable[[Moment], bool]:
    """Up to the next summary, and with it."""
    come = False

    def beyond(moment: Moment) -> bool:
        nonlocal come
        if come:
            return True
        come = isinstance(moment.update, Summary)
        return False

    return beyond
