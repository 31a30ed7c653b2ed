"""The agent of a rank: sends telemetry and receives commands without blocking training.

`send` appends to a bounded queue and returns; the agent's own thread encodes, sends and receives. If the hub is absent,
slow or killed, the queue drops its oldest records and counts them.
"""

import logging
import os
import threading
import time

from msgspec import structs

from agents.protocol import Ack, Board, Command, Event, Hello, Message, Step, Summary, clip
from agents.rank.errors import named
from agents.rank.hub_link import FIRST_S, NONE, Doing, HubLink, Previewer
from agents.rank.outbox import Outbox
from agents.rank.received_commands import ReceivedCommands
from agents.rank.sensors.vitals import Sensors
from agents.rank.stacks import Recorder
from agents.transport.curve_keys import Key
from agents.transport.limits import NoRoomError
from agents.transport.reach import Fallback

log = logging.getLogger("agents")

PAUSE_S = 1.0  # pause after an internal error, because the error may occur again immediately


class Agent:
    """Sends one rank's telemetry to the hub and receives the hub's commands. `doing` returns the step, the current
    operation and the operation's start (`time.monotonic()`). `sensors`: the sensors of the rank's device and machine.

    Without an endpoint, or if this process has no descriptors or threads left for a connection, every method is a
    no-op and `pending` is None; a TCP endpoint needs a `key`. `fallback`: the hub, if `endpoint` is a relay. Methods
    are called from the trainer's thread.
    """

    def __init__(
        self,
        endpoint: str | None,
        doing: Doing,
        sensors: Sensors = NONE,
        key: Key | None = None,
        fallback: Fallback | None = None,
    ) -> None:
        self._pid = os.getpid()
        self._outbox = Outbox()
        self._orders = ReceivedCommands()
        self._seq = 0
        self._closing = threading.Event()
        self._unmuted = threading.Event()
        self._unmuted.set()
        self._began_s = 0.0  # as in the hello, by this machine's clock
        self.cpu_s = 0.0  # CPU time used by the agent's thread
        self._linger_s: float | None = 0.0
        self._restarting = False
        self._link: HubLink | None = None
        if endpoint is None:
            return
        own = threading.get_ident()
        try:
            self._link = HubLink(endpoint, doing, self._outbox, self._orders, sensors, key, own, fallback)
        except NoRoomError as error:
            log.warning("training continues without telemetry: %s", error)
        else:
            self._thread = threading.Thread(target=self._work, args=(self._link,), name="agent", daemon=True)
            self._thread.start()

    def introduce(self, hello: Hello, board: Board | None) -> None:
        """Send this rank's Hello now and whenever a hub requests it; on the leader, also send the knob board.

        Call this method again after each applied change, before `settle`, so that subscribers get the new board before
        the ack. Nothing is sent before the first call.
        """
        if self._link is None:
            return
        hello = structs.replace(hello, capabilities=[*hello.capabilities, *self._link.capabilities])
        if hello.began_s and self._outbox.began_s is None:
            self._began_s = hello.began_s
            self._outbox.began_s = time.monotonic() - max(0.0, time.time() - hello.began_s)
        with self._link.introducing:
            self._link.introduction = (hello, board)
            self.send(hello, *([board] if board else []))

    def send(self, *messages: Message) -> None:
        """Queue messages without blocking. A full queue drops its oldest messages; `Step.lost_records` counts them."""
        if self._link is None or not self._unmuted.is_set():
            return
        for message in messages:
            if isinstance(message, Step):
                self._seq += 1
                message = structs.replace(message, seq=self._seq, lost_records=self._outbox.lost)
            elif isinstance(message, Summary):
                message = structs.replace(message, time_s=self._time_s())
            elif isinstance(message, Event):
                message = structs.replace(message, text=clip(message.text))
            self._outbox.put(message)

    def _time_s(self) -> float:
        """The time in seconds since the epoch, such that a difference to the start time in this rank's hello is a
        duration: steps of the machine's clock do not change it."""
        if self._outbox.began_s is None:
            return time.time()
        return self._began_s + time.monotonic() - self._outbox.began_s

    def preview(self, hook: Previewer) -> None:
        """Answer preview queries (what would these knob changes do?) with `hook`, which is called in the agent's
        thread. Call this on the leader, before `introduce`."""
        if self._link:
            self._link.preview = hook

    def collectives(self, recorder: Recorder) -> None:
        """Set the function that describes this rank's most recent collectives in one sentence. The agent sends this
        description with the stacks of this rank. The agent's thread calls `recorder`, possibly while the training
        thread hangs in a collective.
        """
        if self._link:
            self._link.stacks.recorder = recorder

    @property
    def open(self) -> bool:
        """Whether this process has created the agent and has not closed it. A forked process has a copy of its parent's
        agent, but neither the agent's thread nor its connection."""
        return self._pid == os.getpid() and not self._closing.is_set()

    @property
    def attached(self) -> bool:
        """Whether the agent has an endpoint and is not muted (`mute`)."""
        return self._link is not None and self._unmuted.is_set()

    def wants(self, kind: str, step: int) -> bool:
        """Whether to send a sample of `kind` ("experts", "timeline", "peers") for this step."""
        return self._link is not None and self.attached and self._link.sampling.due(kind, step)

    def mute(self, muted: bool) -> None:
        """Stop or resume sending, so that a benchmark can compare a run with and without telemetry. If a rank sends
        nothing for 5 s, the hub reports it as lost.
        """
        if muted:
            self._unmuted.clear()
        else:
            self._unmuted.set()

    @property
    def lost_records(self) -> int:
        """Number of messages dropped because the queue was full or because they could not be encoded."""
        return self._outbox.lost

    @property
    def refused(self) -> str | None:
        """Why the hub refuses this rank, or why a message could not be encoded; None if there is no problem."""
        return (self._link and self._link.refused) or self._outbox.problem

    @property
    def pending(self) -> Command | None:
        """The oldest command whose outcome has not been passed to `settle` yet; always None on ranks other than the
        leader."""
        return self._orders.oldest

    def settle(self, ack: Ack) -> None:
        """Report the outcome of a command; every rank calls this. If the command is delivered again, the ack is sent
        again.
        """
        if self._link is None:
            return
        self._orders.settle(ack)
        self._outbox.put(ack)

    def close(self, linger_s: float | None = None, restarting: bool = False) -> None:
        """Send the queued messages and Gone, wait until the hub has taken them, and end the thread. A second call does
        nothing.

        Waits at most `linger_s` seconds; by default `LAST_S`, or `FIRST_S` if nothing has been sent yet, because the
        hub may still be starting. If the hub does not confirm in time, this is logged. With `restarting`, Gone tells
        the hub that the launcher will start all ranks again, so the run has not ended.
        """
        if self._closing.is_set():
            return
        self._linger_s, self._restarting = linger_s, restarting
        self._closing.set()
        if self._link is None:
            return
        self._unmuted.set()
        self._thread.join((FIRST_S if linger_s is None else linger_s) + 1.0)

    def _work(self, link: HubLink) -> None:
        while not self._closing.is_set():
            self._unmuted.wait()
            try:
                link.turn()
            except Exception as error:  # noqa: BLE001 - an internal error must not silence the rank for good
                self._outbox.failed(f"the agent had an error and continues: {named(error)}")
                self._closing.wait(PAUSE_S)
            self.cpu_s = time.thread_time()
        link.leave(self._linger_s, self._restarting)
