"""What lives in a rank's process: telemetry out, commands in, and never in training's way.

`send` appends to a bounded queue and returns; a thread of its own packs, sends and receives. A hub that is
absent, slow or killed costs the oldest records in the queue, which are counted, and nothing else.
"""

import threading
import time

from msgspec import structs

from agents.protocol import PREVIEWS, Ack, Board, Command, Event, Hello, Message, Step, clip
from agents.rank.errors import named
from agents.rank.hub_link import NONE, Doing, Foresee, HubLink
from agents.rank.outbox import Outbox
from agents.rank.received_commands import ReceivedCommands
from agents.rank.vitals import Sensors
from agents.transport.keys import Key

PAUSE_S = 1.0  # after an error of ours, which may come again at once


class Agent:
    """The agent of one rank. `doing` says step, current operation, and since when (`time.monotonic()`); `sensors`, what
    this rank tells of its device and its machine.

    Without an endpoint every method is a no-op and `pending` is None; one over TCP takes a `key`. Calls come from
    the trainer's thread.
    """

    def __init__(
        self, endpoint: str | None, doing: Doing, sensors: Sensors = NONE, key: Key | None = None
    ) -> None:
        self._outbox = Outbox()
        self._orders = ReceivedCommands()
        self._seq = 0
        self._closing = threading.Event()
        self._telling = threading.Event()
        self._telling.set()
        self.cpu_s = 0.0  # that the agent's own thread has used
        self._linger_s = 0.0
        self._link: HubLink | None = None
        if endpoint is not None:
            self._link = HubLink(endpoint, doing, self._outbox, self._orders, sensors, key)
            self._thread = threading.Thread(target=self._work, args=(self._link,), name="agent", daemon=True)
            self._thread.start()

    def introduce(self, hello: Hello, board: Board | None) -> None:
        """Who this rank is and, from the leader, its knobs: sent now, and to every hub that asks.

        Call it again after each applied revision, before `settle`, so that watchers see the new board first.
        Nothing is sent before the first call.
        """
        if self._link is None:
            return
        if self._link.preview:
            hello = structs.replace(hello, capabilities=[*hello.capabilities, PREVIEWS])
        if hello.began_s and self._outbox.began_s is None:
            self._outbox.began_s = time.monotonic() - max(0.0, time.time() - hello.began_s)
        with self._link.introducing:
            self._link.introduction = (hello, board)
            self.send(hello, *([board] if board else []))

    def send(self, *messages: Message) -> None:
        """Queue messages; never blocks. A full queue loses its oldest, counted by `Step.lost_records`."""
        if self._link is None or not self._telling.is_set():
            return
        for message in messages:
            if isinstance(message, Step):
                self._seq += 1
                message = structs.replace(message, seq=self._seq, lost_records=self._outbox.lost)
            elif isinstance(message, Event):
                message = structs.replace(message, text=clip(message.text))
            self._outbox.put(message)

    def preview(self, hook: Foresee) -> None:
        """Answer what changes would do by `hook`, which is called in the agent's thread. Set it on the leader, before
        it is introduced."""
        if self._link:
            self._link.preview = hook

    @property
    def attached(self) -> bool:
        """Whether there is anyone to tell at all."""
        return self._link is not None and self._telling.is_set()

    def wants(self, kind: str, step: int) -> bool:
        """Whether the full vectors of `kind` ("experts", "timeline", "peers") shall be sent of this step."""
        return self._link is not None and self.attached and self._link.sampling.due(kind, step)

    def mute(self, muted: bool) -> None:
        """Say nothing at all until unmuted, so that a bench can compare both within one run; a hub that hears nothing
        for 5 s takes the rank for lost."""
        if muted:
            self._telling.clear()
        else:
            self._telling.set()

    @property
    def lost_records(self) -> int:
        """Messages this agent dropped, because its queue was full or they could not be sent at all."""
        return self._outbox.lost

    @property
    def refused(self) -> str | None:
        """Why the hub does not take this rank, or why a message could not be sent; None if all is well."""
        return (self._link and self._link.refused) or self._outbox.problem

    @property
    def pending(self) -> Command | None:
        """The oldest command that is not settled yet; None on every rank but the leader."""
        return self._orders.oldest

    def settle(self, ack: Ack) -> None:
        """Say what became of a command, on every rank; one delivered again is answered from memory."""
        if self._link is None:
            return
        self._orders.settle(ack)
        self._outbox.put(ack)

    def close(self, linger_s: float = 0.5) -> None:
        """Send what can be sent in `linger_s`, say goodbye, end the thread. A second call does nothing."""
        if self._link is None or self._closing.is_set():
            return
        self._linger_s = linger_s
        self._closing.set()
        self._telling.set()
        self._thread.join(linger_s + 1.0)

    def _work(self, link: HubLink) -> None:
        while not self._closing.is_set():
            self._telling.wait()
            try:
                link.turn()
            except Exception as error:  # noqa: BLE001 - a mistake of ours must not silence the rank for good
                self._outbox.failed(f"the agent had an error and goes on: {named(error)}")
                self._closing.wait(PAUSE_S)
            self.cpu_s = time.thread_time()
        link.leave(self._linger_s)
