"""Playback source: updates a store, from which the screens are drawn, with the contents of a recording, at 0.25 to 1024
times the recorded speed or paused."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from agents.protocol import Event, Summary, clip
from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Moment, Position, Recording
from agents.recording.replay import Replay
from agents.requests import Request
from cockpit.data.curves.view import View
from cockpit.data.history.experts import ExpertHistory
from cockpit.data.link import RECORDING
from cockpit.data.sources.past_experts import history_at
from cockpit.data.sources.recorded import playback_position
from cockpit.data.sources.source import ViewerError, faults_reported
from cockpit.data.store import Store

TICK_S = 0.05
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
SKIP_S = 5.0  # playback skips longer gaps, because a run may have been suspended overnight
JUMP = 0.05  # length of a jump, as a share of the whole recording

Move = Callable[[Replay], None]


class Playback:
    """Source that plays `recording` into a store. Playback starts at the beginning of the recording; if the position
    `begin` is given, it is paused there instead until the user continues it. The source rejects preview queries and
    changes of knobs. Any thread may call the methods that move the position; they are queued, and the thread of this
    source executes them."""

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
        self._at_s = 0.0  # current position, as a Unix time of the recorded hub's clock
        self._moves: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def clock(self) -> float:
        """The recorded time at the current position. During playback, this method is the store's clock."""
        return self._at_s

    def start(self, store: Store) -> None:
        self._thread = threading.Thread(target=self._run, args=(store,), name="cockpit-playback", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2.0)

    def sample(self, kinds: frozenset[str]) -> None:
        """Do nothing, because a recording contains only the samples that were sent."""

    def ask(self, asked: Request) -> None:
        raise ViewerError("this is a recording: it accepts no queries and no changes")

    # ---------------------------------------------------------------------------------------------- moving

    def toggle(self) -> None:
        """Pause or continue. At the end, play again from the beginning."""

        def move(replay: Replay) -> None:
            if self.paused and replay.ended:
                self._go(replay, self._recording.at_start())
            self.paused = not self.paused

        self._moves.put(move)

    def faster(self, by: int) -> None:
        """Move `by` positions along `SPEEDS` from the current speed: to a higher speed, or if `by` is negative, to a
        lower speed."""

        def move(_: Replay) -> None:
            nearest = min(range(len(SPEEDS)), key=lambda i: abs(SPEEDS[i] - self.speed))
            self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, nearest + by))]

        self._moves.put(move)

    def step(self, by: int) -> None:
        """Move to the next training step or, if `by` is negative, to the previous one, and pause there."""

        def move(replay: Replay) -> None:
            self.paused = True
            if by > 0:
                replay.forward(_after_summary())
                self._at_s = replay.time_s
                return
            now = replay.state.summaries[-1].step if replay.state.summaries else 0
            try:
                self._go(replay, self._recording.at_step(now - 1))
            except RecordingError:  # the recording does not have that step
                self._go(replay, self._recording.at_start())

        self._moves.put(move)

    def go_to(self, step: int, refused: Callable[[str], object]) -> None:
        """Move to a training step and pause there. If the step is not recorded, `refused` is called with the reason, in
        this source's thread.
        """

        def move(replay: Replay) -> None:
            try:
                self._go(replay, self._recording.at_step(step))
                self.paused = True
            except RecordingError as error:
                refused(str(error))

        self._moves.put(move)

    def jump(self, by: int) -> None:
        """Move forward by a multiple of 5 % of the recording's duration. `by`: the multiple, negative to move
        backward."""

        def move(replay: Replay) -> None:
            span = self._recording.span()
            to = self._at_s + by * JUMP * (span.last_s - span.first_s)
            to = min(span.last_s, max(span.first_s, to))
            self._go(replay, self._recording.at_time(to))
            self._at_s = to

        self._moves.put(move)

    def ends(self, by: int) -> None:
        """Move to the beginning, or to the current end of the recording."""
        at = self._recording.at_end if by > 0 else self._recording.at_start
        self._moves.put(lambda replay: self._go(replay, at()))

    def _go(self, replay: Replay, place: Position) -> None:
        replay.seek(place)
        self._at_s = replay.time_s

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self, store: Store) -> None:
        with faults_reported(store, f"cockpit replay {self.target} opens it again"):
            try:
                self._play(store)
            except RecordingError as error:
                with store.lock:
                    store.source_error = str(error)
            finally:
                self._recording.close()

    def _play(self, store: Store) -> None:
        replay = Replay(self._recording, store.lock)
        self._go(replay, self._begin or self._recording.at_start())
        resets = -1
        span = self._recording.span()
        last_s = time.monotonic()
        noted = 0
        # The history before a move, shown until the history at the new position has been read.
        known: ExpertHistory | None = None
        while not self._stop.is_set():
            moved = self._moved(replay)
            now = time.monotonic()
            elapsed, last_s = min(now - last_s, 1.0), now
            updates = []
            if not self.paused:
                self._at_s += elapsed * self.speed
                if (next_s := replay.next_s) is not None and next_s - self._at_s > SKIP_S:
                    self._at_s = next_s
                updates = replay.forward(lambda moment: moment.time_s > self._at_s)
                if replay.ended:
                    self.paused, self._at_s = True, replay.time_s
            with store.lock:
                if moved or replay.resets != resets:
                    resets = replay.resets
                    if moved:
                        store.rank_history.clear()
                    if known is None:
                        known = store.expert_history.copy()
                    store.adopt(replay.state)
                    noted = 0
                    span = self._recording.span()
                else:
                    store.note(updates)
                damage = self._recording.damage
                for text in damage[noted:]:
                    store.apply([Event(self._at_s, "error", RECORDING, clip(f"incomplete: {text}"))])
                noted = len(damage)
                store.set_message_age(0.0)
                view = store.curve_view.wanted_detail()
                store.playback_position = playback_position(
                    replay, span.first_s, span.last_s, self.speed, self.paused
                )
            if known is not None and (past := history_at(replay, known, self._has_moves)) is not None:
                known = None
                with store.lock:
                    store.set_expert_history(past)
            if view:
                interrupted = partial(self._interrupted, store, view)
                detail = curve_between(self._recording, *view, replay.epoch, replay.seq, interrupted)
                with store.lock:
                    if detail is not None:
                        store.curve_view.set_detail(view, detail)

    def _interrupted(self, store: Store, view: View) -> bool:
        """Whether to stop reading the recording for the step range `view`. This is so if `stop` was called, if a call
        such as `go_to` is queued, or if the curves now show another range of steps."""
        return self._has_moves() or store.curve_view.steps != view

    def _has_moves(self) -> bool:
        """Whether `stop` was called, or a call such as `go_to` or `toggle` is queued."""
        return self._stop.is_set() or not self._moves.empty()

    def _moved(self, replay: Replay) -> bool:
        """Execute the queued calls such as `go_to`; if there is none, wait for one for at most `TICK_S` seconds. Return
        True if the position changed."""
        place = replay.resets, replay.epoch, replay.seq
        try:
            move = self._moves.get(timeout=TICK_S)
            while True:
                move(replay)
                move = self._moves.get_nowait()
        except queue.Empty:
            return (replay.resets, replay.epoch, replay.seq) != place


def _after_summary() -> Callable[[Moment], bool]:
    """A predicate for `Replay.forward`, which calls it with each `Moment` in order. It returns False up to and
    including the next step summary, and True afterwards.
    """
    found = False

    def beyond(moment: Moment) -> bool:
        nonlocal found
        if found:
            return True
        found = isinstance(moment.update, Summary)
        return False

    return beyond
