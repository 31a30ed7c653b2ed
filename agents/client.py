"""What a cockpit or a script uses to watch a run and to steer it: synchronous, for one thread."""

import contextlib
import getpass
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import zmq

from agents import protocol
from agents.protocol import (
    AnyMessage,
    Credit,
    Decide,
    Message,
    Preview,
    Previewed,
    Propose,
    Refused,
    Sample,
    Try,
    Unknown,
    Update,
    Updates,
    Value,
    WireError,
    codec,
)
from agents.rundir.local_machine import this_host
from agents.state.run_state import RunState
from agents.transport.keys import Key
from agents.transport.reconnecting import ReconnectingSocket

FRAMES = 64  # of credit at a time; the hub may send a hundred a second
SILENCE_S = 2.5  # after which the hub is asked again; it says something each second
RESEND_S = 1.0  # a proposal, until it is answered
TOLD_S = 3.0  # a refusal, even though the hub serves us
ANSWERS_KEPT = 64
DECIDE_S = 30.0  # a word on a trial is repeated
PREVIEW_S = 30.0  # a question what a change would do, likewise
LOOK_S = 15.0  # what is looked at, unless it is asked for again
WAIT_S = 0.25  # at most, between two looks at what has to be asked again


class Client:
    """Follows a hub, over TCP under `key`. `state` is the run as of update `seq` of the hub start `epoch`, and
    `poll` moves it on.

    A gap, a hub that was killed and started again, and a lost request are all healed inside, by a new
    snapshot where needed; `resets` counts how often `state` was built anew.
    """

    def __init__(
        self,
        endpoint: str,
        key: Key | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`lock` is held while `state` changes, for another thread to look at it."""
        self.endpoint = endpoint
        self._lock = lock or contextlib.nullcontext()
        self.state = RunState()
        self.epoch = ""
        self.seq = 0
        self.resets = 0
        self._refused: str | None = None  # in the hub's words; None again when it serves us
        self._refused_s = 0.0
        self._heard_s: float | None = None
        self._asked_s = -SILENCE_S
        self._credit = 0  # frames the hub may still send
        self._request = (0.0, True, 0)  # as `want` has it
        self._rebuilt: _Rebuilt | None = None
        self.previews: dict[str, Previewed] = {}  # answers, by the id of the question; the newest
        self.denied: dict[str, str] = {}  # why the hub does not take a question, by its id; the newest
        self._unanswered: dict[tuple[type, str], _Question] = {}
        self._looking: Sample | None = None
        self._looked_s = 0.0
        # Not immediate: libzmq would drop the hub's last frames, unread, when the hub ends. What piles up for
        # a hub that is not there is kept short instead; it is harmless, for every question may be asked
        # twice.
        self._line = ReconnectingSocket(endpoint, key, immediate=False, high_water=8, reconnect_max_ms=1000)
        self._dealer = self._line.socket

    @property
    def refused(self) -> str | None:
        """Why the hub does not let us in or does not serve us; None if all is well."""
        return self._line.refusal or self._refused

    @property
    def age_s(self) -> float | None:
        """Seconds since the hub was last heard; None if it never was."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    def poll(self, timeout_s: float) -> list[Update]:
        """Wait up to `timeout_s` for updates, apply them to `state`, and return them in order.

        After a snapshot `state` is a new object, `resets` has grown, and the snapshot's updates are returned.
        """
        deadline = time.monotonic() + timeout_s
        applied: list[Update] = []
        while True:
            self._line.look()
            self._ask()
            remaining = deadline - time.monotonic()
            if self._dealer.poll(int(1000 * max(0.0, min(remaining, WAIT_S)))):
                self._drain(applied)
                self._ask()
            if applied or remaining <= 0:
                return applied

    def want(self, hz: float = 0.0, ranks: bool = True, frame_bytes: int = 0) -> None:
        """From now on, of each rank only the newest, `hz` times a second (0: every update, one by one).

        Without `ranks` nothing that single ranks measure. `frame_bytes`: at most about so many each time; what is left
        over comes the next time.
        """
        self._request = (hz, ranks, frame_bytes)
        self._credit = 0

    def propose(
        self,
        changes: Mapping[str, Value],
        base_revision: int | None = None,
        expires_step: int | None = None,
        who: str | None = None,
        id: str | None = None,
        reason: str = "",
    ) -> str:
        """Ask for `changes`, all or none, and return the proposal's id; `poll` repeats it until it is
        answered.

        The same `id` never asks twice, not even after a restart of either side. ValueError: it cannot be
        asked at all.
        """
        return self.request(
            Propose(
                id or os.urandom(8).hex(),
                dict(changes),
                base_revision,
                expires_step,
                who or whoami(),
                reason,
            )
        )

    def undo(self, base_revision: int | None = None, who: str | None = None, reason: str = "") -> str:
        """Ask that the newest change that is not undone yet be taken back; returns the proposal's id."""
        id = os.urandom(8).hex()
        return self.request(Propose(id, {}, base_revision, None, who or whoami(), reason, undo=True))

    def try_out(
        self, changes: Mapping[str, Value], steps: int, who: str | None = None, reason: str = "", id: str = ""
    ) -> str:
        """Ask that one knob be tried for so many steps, and return the trial's id; see `state.trials`."""
        return self.request(Try(id or os.urandom(8).hex(), dict(changes), steps, who or whoami(), reason))

    def decide(self, trial: str, keep: bool, who: str | None = None) -> None:
        """Keep what `trial` tries, or have it taken back now; "" is the one under way. ValueError: it cannot be asked.

        It is repeated until `state.trials` shows what became of it, or nothing has for `DECIDE_S`.
        """
        going = (one.id for one in self.state.trials.values() if not one.settled)
        trial = trial or next(going, "")
        if not trial:
            raise ValueError("no trial is under way")
        self.request(Decide(keep, trial, who or whoami()))

    def preview(self, changes: Mapping[str, Value]) -> str:
        """Ask what `changes` would do, and return the question's id; the answer comes to `previews`."""
        return self.request(Preview(os.urandom(8).hex(), dict(changes)))

    def request(self, asked: "Asked") -> str:
        """Ask for what has an id already, until it is answered. ValueError: it cannot be asked at all."""
        codec.decode(codec.encode([asked]))  # what the hub could not read is refused here, with the place
        self.denied.pop(asked.id, None)
        self._unanswered[type(asked), asked.id] = _Question(asked, time.monotonic())
        self._ask()
        return asked.id

    def withdraw(self, preview: str) -> None:
        """The answer to the question `preview` is of no use any more: it is not repeated."""
        self._unanswered.pop((Preview, preview), None)

    def look(self, *kinds: str, ranks: Sequence[int] = ()) -> None:
        """Ask for full vectors ("experts", "timeline", "peers") oftener, of `ranks` or of all, for as long as `poll` is
        called; of no kinds: no longer. The hub decides how often."""
        self._looking = Sample(list(kinds), LOOK_S if kinds else 0.0, list(ranks))
        self._looked_s = -LOOK_S
        self._ask()

    def close(self) -> None:
        """Leave. What was proposed and not yet answered may or may not have been heard."""
        self._line.close()

    # --------------------------------------------------------------------------------------------- asking

    def _next_credit(self) -> Credit:
        return Credit(protocol.VERSION, self.epoch, self.seq, FRAMES, *self._request)

    def _ask(self) -> None:
        now = time.monotonic()
        silent = now - max(self._asked_s, self._heard_s or 0.0) >= SILENCE_S
        if (self._credit == 0 or silent) and self._send(self._next_credit()):
            self._credit, self._asked_s = FRAMES, now
        if self._looking and now - self._looked_s >= LOOK_S / 3 and self._send(self._looking):
            self._looked_s = now
            if not self._looking.kinds:
                self._looking = None
        for key, question in list(self._unanswered.items()):
            asked = question.asked
            late = now - question.began_s > ASKED_S.get(type(asked), math.inf)
            if late or asked.id in self.denied or self._answered(asked):
                del self._unanswered[key]
            elif now - question.sent_s >= RESEND_S and self._send(asked):
                question.sent_s = now

    def _answered(self, asked: "Asked") -> bool:
        trial = self.state.trials.get(asked.id)
        match asked:
            case Propose():
                return asked.id in self.state.commands
            case Try():
                return trial is not None
            case Decide():
                return trial is not None and (trial.settled or trial.state == "reverting")
            case Preview():
                return asked.id in self.previews

    def _send(self, message: Message) -> bool:
        try:
            self._dealer.send(codec.encode([message]), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # ------------------------------------------------------------------------------------------ receiving

    def _drain(self, applied: list[Update]) -> None:
        for _ in range(FRAMES):
            try:
                messages = codec.decode(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                self._refused, self._refused_s = str(error), time.monotonic()
                continue
            self._heard_s = time.monotonic()
            for message in messages:
                self._take(message, applied)

    def _take(self, message: AnyMessage, applied: list[Update]) -> None:
        if isinstance(message, Refused):
            self._refused, self._refused_s = message.why, time.monotonic()
            if message.asked:
                self.denied[message.asked] = message.why
                _forget(self.denied)
        elif isinstance(message, Previewed):
            self.previews[message.id] = message
            _forget(self.previews)
        elif isinstance(message, Updates):
            self._credit = max(0, self._credit - 1)
            if self._refused and time.monotonic() - self._refused_s > TOLD_S:
                self._refused = None
            if message.snapshot:
                self._take_snapshot(message, applied)
            else:
                self._take_live(message, applied)

    def _take_live(self, frame: Updates, applied: list[Update]) -> None:
        # Of the newest alone: all that matters after `since`. Of everything: numbered one by one.
        first = frame.seq - len(frame.updates) + 1 if frame.since is None else frame.since + 1
        if frame.epoch != self.epoch or first > self.seq + 1:
            # From another hub start, or something is missing between: only a snapshot helps.
            self._lose_track()
            return
        known = self.seq + 1 - first if frame.since is None else 0  # what was sent twice is known already
        with self._lock:
            for update in frame.updates[known:]:
                self.state.apply(update)
        applied += (update for update in frame.updates[known:] if not isinstance(update, Unknown))
        self.seq = max(self.seq, frame.seq)

    def _take_snapshot(self, frame: Updates, applied: list[Update]) -> None:
        if frame.begins:
            self._rebuilt = _Rebuilt(frame.epoch, frame.seq, frame.snapshot)
        rebuilt = self._rebuilt
        if rebuilt is None or (frame.epoch, frame.seq, frame.snapshot) != (
            rebuilt.epoch,
            rebuilt.seq,
            rebuilt.awaited,
        ):
            self._lose_track()
            return
        rebuilt.updates += frame.updates
        rebuilt.awaited -= 1
        if rebuilt.awaited:
            return
        self._rebuilt = None
        state = RunState()
        for update in rebuilt.updates:
            state.apply(update)
        self.state = state
        self.epoch, self.seq, self._refused = rebuilt.epoch, rebuilt.seq, None
        self.resets += 1
        # What was applied before it is in the state no more; the caller gets what the state is made of.
        applied[:] = (update for update in rebuilt.updates if not isinstance(update, Unknown))

    def _lose_track(self) -> None:
        """Ask for a snapshot with the next credit, at once."""
        self.epoch, self.seq, self._rebuilt, self._credit = "", 0, None, 0


class _Rebuilt:
    """A snapshot of which some frames are still to come."""

    def __init__(self, epoch: str, seq: int, frames: int) -> None:
        self.epoch = epoch
        self.seq = seq
        self.awaited = frames
        self.updates: list[Update] = []


Asked = Propose | Try | Decide | Preview
"""What a client asks of a hub, each with an id."""
ASKED_S: dict[type, float] = {Decide: DECIDE_S, Preview: PREVIEW_S}
"""How long a question is repeated; a change that is asked for, until it is answered."""


@dataclass
class _Question:
    """Something that was asked and is not answered."""

    asked: Asked
    began_s: float
    sent_s: float = 0.0


def _forget(answers: dict[str, Any]) -> None:
    if len(answers) > ANSWERS_KEPT:
        del answers[next(iter(answers))]


def whoami() -> str:
    """user@host:pid, by which an operator is known in the journal."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        user = str(os.getuid())
    return f"{user}@{this_host()}:{os.getpid()}"
