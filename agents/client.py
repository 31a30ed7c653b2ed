"""The client of a hub, for cockpits and scripts: watches a run and steers it. The client is synchronous, and only one
thread may use it.
"""

import getpass
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
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
    RankStacks,
    Refused,
    Sample,
    StackQuery,
    StacksCollected,
    Try,
    Update,
    Updates,
    Value,
    WireError,
    codec,
)
from agents.requests import PendingRequests, Request
from agents.rundir.local_machine import this_host
from agents.state.replica import Replica
from agents.state.run_state import RunState
from agents.transport.curve_keys import Key
from agents.transport.reconnecting import ReconnectingSocket

FRAMES = 64  # credit per grant; the hub may send a hundred frames a second
# The hub sends a frame each second. After this long without one, the client grants credit again.
SILENCE_S = 2.5
REFUSAL_SHOWN_S = 3.0  # minimum time for which a refusal is shown
ANSWERS_KEPT = 64
SAMPLE_LEASE_S = 15.0  # how long ranks send more samples after one request
WAIT_S = 0.25  # maximum wait before the client checks again whether it has something to send


class Client:
    """Subscribes to a hub; a connection over TCP needs `key`. `state` is the state of the run after update `seq`.
    `epoch` identifies the hub process that numbered the updates. `poll` brings `state` up to date.

    The client recovers by itself from missed updates, restarts of the hub and lost requests. If needed, it requests a
    new snapshot; `resets` counts how often `state` was rebuilt.
    """

    def __init__(
        self,
        endpoint: str,
        key: Key | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """`lock` is held while `state` changes; another thread that reads `state` must hold it too."""
        self.endpoint = endpoint
        self._replica = Replica(lock)
        self._refused: str | None = None  # why the hub refuses this client; None once the hub serves it
        self._refused_s = 0.0
        self._received_s: float | None = None
        self._behind_since_s: float | None = None
        self._credited_s = -SILENCE_S
        self._credit = 0  # frames that the hub may still send
        self._subscription = (0.0, True, 0)  # hz, ranks, frame_bytes: see `set_subscription`
        self.previews: dict[str, Previewed] = {}  # the newest answers, by the id of the query
        # Answers to stack queries, by the id of the query: the stacks so far, and the message that ends them.
        self.stacks: dict[str, dict[int, RankStacks]] = {}
        self.stacks_collected: dict[str, StacksCollected] = {}
        self.denied: dict[str, str] = {}  # reasons of the newest refusals, by the id of the request
        self._pending = PendingRequests()
        self._sample: Sample | None = None
        self._sampled_s = 0.0
        # Without `immediate`, because libzmq would then drop the hub's last frames, unread, when the hub ends. A short
        # queue limits how many requests accumulate while the hub is absent; sending them later is harmless, because
        # every request may be sent twice.
        self._line = ReconnectingSocket(endpoint, key, immediate=False, high_water=8, reconnect_max_ms=1000)
        self._dealer = self._line.socket

    @property
    def state(self) -> RunState:
        """The newest known state of the run; each snapshot replaces it with a new object."""
        return self._replica.state

    @property
    def epoch(self) -> str:
        """Identifies the hub process from which `state` was received; empty while there is no state."""
        return self._replica.epoch

    @property
    def seq(self) -> int:
        """The sequence number of the last update that was applied to `state`."""
        return self._replica.seq

    @property
    def resets(self) -> int:
        """The number of times that `state` was rebuilt."""
        return self._replica.resets

    @property
    def refused(self) -> str | None:
        """Why the hub refuses this client; None if it does not."""
        return self._line.refusal or self._refused

    @property
    def age_s(self) -> float | None:
        """Seconds since the last frame from the hub; None before the first frame."""
        return None if self._received_s is None else time.monotonic() - self._received_s

    @property
    def behind_s(self) -> float:
        """Seconds for which `state` has lagged behind the last frame, because the hub is still sending earlier updates;
        0 if `state` is up to date.
        """
        return 0.0 if self._behind_since_s is None else time.monotonic() - self._behind_since_s

    @property
    def loading(self) -> tuple[int, int] | None:
        """While a snapshot is being received: how many of its frames have arrived, and how many it has in total. Else
        None.
        """
        return self._replica.loading

    def poll(self, timeout_s: float) -> list[Update]:
        """Wait up to `timeout_s` for updates, apply them to `state`, and return them in order.

        After a snapshot, `state` is a new object, `resets` has increased, and the updates that rebuild the state are
        returned.
        """
        return list(self.changes(timeout_s))

    def changes(self, timeout_s: float) -> Iterable[Update]:
        """The same as `poll`, except that after a snapshot the updates that rebuild the state are generated one by one.
        This avoids building a list of these updates for a caller that only reads the new `state`.
        """
        deadline, resets = time.monotonic() + timeout_s, self.resets
        applied: list[Update] = []
        while True:
            self._line.check_handshakes()
            self._send_due()
            remaining = deadline - time.monotonic()
            if self._dealer.poll(int(1000 * max(0.0, min(remaining, WAIT_S)))):
                self._receive(applied)
                self._send_due()
            if self.resets != resets:
                return self.state.replay()
            if applied or remaining <= 0:
                return applied

    def set_subscription(self, hz: float = 0.0, ranks: bool = True, frame_bytes: int = 0) -> None:
        """From now on, receive only the newest record of each rank, `hz` times a second; if `hz` is 0, receive every
        update.

        Without `ranks`, the hub sends no per-rank records. `frame_bytes`: approximate maximum size of a frame; updates
        that do not fit are sent in the next frame.
        """
        self._subscription = (hz, ranks, frame_bytes)
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
        """Propose `changes`, all or none, and return the proposal's id. `poll` resends the proposal until it is
        answered.

        A proposal with the same `id` is applied once, even after a restart of the client or the hub. Raises ValueError
        if the proposal cannot be encoded.
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
        """Propose to undo the newest change that has not been undone; returns the proposal's id."""
        id = os.urandom(8).hex()
        return self.request(Propose(id, {}, base_revision, None, who or whoami(), reason, undo=True))

    def start_trial(
        self, changes: Mapping[str, Value], steps: int, who: str | None = None, reason: str = "", id: str = ""
    ) -> str:
        """Start a trial of `changes`; returns the trial's id. The hub measures `steps` steps before the change and
        `steps` after it."""
        return self.request(Try(id or os.urandom(8).hex(), dict(changes), steps, who or whoami(), reason))

    def decide(self, trial: str, keep: bool, who: str | None = None) -> None:
        """End the trial with the id `trial` ("": the running one): keep its knob values, or revert them now. Raises
        ValueError if no trial is running.

        The request is repeated until `state.trials` shows the outcome, but for at most 30 s.
        """
        running = (one.id for one in self.state.trials.values() if not one.settled)
        trial = trial or next(running, "")
        if not trial:
            raise ValueError("no trial is running")
        self.request(Decide(keep, trial, who or whoami()))

    def preview(self, changes: Mapping[str, Value]) -> str:
        """Send a preview query for `changes`, and return the query's id. The answer appears in `previews`."""
        return self.request(Preview(os.urandom(8).hex(), dict(changes)))

    def collect_stacks(self, ranks: Sequence[int] = (), threads: bool = False) -> str:
        """Request the Python stacks of `ranks`, or of all ranks; returns the query's id. The answers arrive in
        `stacks`; when they are complete, `stacks_collected` contains the query's id. `threads`: request all threads,
        not only the training thread."""
        return self.request(StackQuery(os.urandom(8).hex(), list(ranks), threads))

    def request(self, request: Request) -> str:
        """Send a request and repeat it until it is answered. Returns the request's id. Raises ValueError if the request
        cannot be encoded.
        """
        codec.decode(codec.encode([request]))  # an error here names the field that the hub could not read
        self.denied.pop(request.id, None)
        self._pending.add(request)
        self._send_due()
        return request.id

    def withdraw(self, preview: str) -> None:
        """Stop repeating the query `preview`, because its answer is no longer needed."""
        self._pending.withdraw(Preview, preview)

    def request_samples(self, *kinds: str, ranks: Sequence[int] = ()) -> None:
        """Request that `ranks` (default: all) send these samples more often: "experts" (loads of all experts),
        "timeline", "peers" (bytes by destination rank). `poll` renews the request, so the request lasts as long as
        `poll` is called.

        A call without kinds ends the request. The hub decides how often ranks send samples.
        """
        self._sample = Sample(list(kinds), SAMPLE_LEASE_S if kinds else 0.0, list(ranks))
        self._sampled_s = -SAMPLE_LEASE_S
        self._send_due()

    def close(self) -> None:
        """Close the connection. A request without an answer may still have reached the hub."""
        self._line.close()

    # --------------------------------------------------------------------------------------------- sending

    def _next_credit(self) -> Credit:
        return Credit(protocol.VERSION, self.epoch, self.seq, FRAMES, *self._subscription)

    def _send_due(self) -> None:
        now = time.monotonic()
        silent = now - max(self._credited_s, self._received_s or 0.0) >= SILENCE_S
        if (self._credit == 0 or silent) and self._send(self._next_credit()):
            self._credit, self._credited_s = FRAMES, now
        if self._sample and now - self._sampled_s >= SAMPLE_LEASE_S / 3 and self._send(self._sample):
            self._sampled_s = now
            if not self._sample.kinds:
                self._sample = None
        self._pending.send_due(self._send, self.state, {*self.previews, *self.stacks_collected, *self.denied})

    def _send(self, message: Message) -> bool:
        try:
            self._dealer.send(codec.encode([message]), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # ------------------------------------------------------------------------------------------ receiving

    def _receive(self, applied: list[Update]) -> None:
        for _ in range(FRAMES):
            try:
                messages = codec.decode(self._dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except WireError as error:
                self._refused, self._refused_s = str(error), time.monotonic()
                continue
            self._received_s = time.monotonic()
            for message in messages:
                self._take(message, applied)

    def _take(self, message: AnyMessage, applied: list[Update]) -> None:
        if isinstance(message, Refused):
            self._refused, self._refused_s = message.why, time.monotonic()
            if message.request_id:
                self.denied[message.request_id] = message.why
                _drop_oldest(self.denied)
        elif isinstance(message, Previewed):
            self.previews[message.id] = message
            _drop_oldest(self.previews)
        elif isinstance(message, RankStacks):
            if message.id not in self.stacks_collected:
                self.stacks.setdefault(message.id, {})[message.rank] = message
                _drop_oldest(self.stacks)
        elif isinstance(message, StacksCollected):
            self.stacks_collected[message.id] = message
            _drop_oldest(self.stacks_collected)
        elif isinstance(message, Updates):
            self._credit = max(0, self._credit - 1)
            if self._refused and time.monotonic() - self._refused_s > REFUSAL_SHOWN_S:
                self._refused = None
            resets = self._replica.resets
            if not self._replica.apply(message, applied):
                self._credit = 0  # so that the client grants credit at once and thereby requests a snapshot
            elif self._replica.resets > resets:
                self._refused = None
            if not self._replica.behind:
                self._behind_since_s = None
            elif self._behind_since_s is None:
                self._behind_since_s = time.monotonic()


def _drop_oldest(answers: dict[str, Any]) -> None:
    if len(answers) > ANSWERS_KEPT:
        del answers[next(iter(answers))]


def whoami() -> str:
    """user@host:pid, which identifies an operator in the journal."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user in a container may have no name
        user = str(os.getuid())
    return f"{user}@{this_host()}:{os.getpid()}"
