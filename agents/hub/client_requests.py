"""Handles client requests: limits their size, and passes each message to the part of the hub that handles it."""

import time

from agents import protocol
from agents.hub.commands.control import Control
from agents.hub.commands.preview_queries import PreviewQueries
from agents.hub.commands.stack_queries import StackQueries
from agents.hub.commands.trials import Trials
from agents.hub.telemetry.sampling_leases import SamplingLeases
from agents.hub.telemetry.subscribers import Subscribers
from agents.protocol import (
    AnyMessage,
    Credit,
    Decide,
    Message,
    Preview,
    Propose,
    Refused,
    Sample,
    StackQuery,
    Try,
    WireError,
    codec,
)
from agents.transport.roles import Role, signed
from agents.transport.server_sockets import Received

CLIENT_FRAME_BYTES = 64 << 10  # maximum size of a frame from a client
CLIENT_MESSAGES = 64  # maximum number of messages in such a frame


def decode(frame: bytes) -> list[AnyMessage]:
    """The messages in a client's frame. Raises WireError if the frame is malformed or too large; the whole frame is
    then refused.
    """
    if len(frame) > CLIENT_FRAME_BYTES:
        raise WireError(f"a client's frame has at most {CLIENT_FRAME_BYTES} bytes, not {len(frame)}")
    messages = codec.decode(frame)
    if len(messages) > CLIENT_MESSAGES:
        raise WireError(f"a client's frame has at most {CLIENT_MESSAGES} messages, not {len(messages)}")
    return messages


class ClientRequests:
    """Passes each message of a client to the part of the hub that handles it."""

    def __init__(
        self,
        subscribers: Subscribers,
        control: Control,
        trials: Trials,
        preview_queries: PreviewQueries,
        sampling_leases: SamplingLeases,
        stack_queries: StackQueries,
    ) -> None:
        self._subscribers, self._control, self._trials = subscribers, control, trials
        self._preview_queries, self._sampling_leases = preview_queries, sampling_leases
        self._stack_queries = stack_queries

    def take(self, received: Received, messages: list[AnyMessage]) -> list[Message]:
        """Handle the messages of one frame from a client whose role allows all of them. Returns a refusal if one of
        them is refused at once; all other answers are published later."""
        now = time.monotonic()
        for message in (signed(received.name, message) for message in messages):
            why: str | None = None
            match message:
                case Credit() if message.version != protocol.VERSION:
                    raise WireError(codec.version_refusal(message.version))
                case Credit():
                    viewer = received.role is Role.VIEWER
                    why = self._subscribers.credit(received.peer, message, now, received.name, viewer)
                case Propose():
                    self._control.propose(message)
                case Try():
                    self._trials.start(message)
                case Decide():
                    self._trials.decide(message)
                case Preview():
                    self._preview_queries.ask(received.peer, message, now)
                case StackQuery():
                    why = self._stack_queries.ask(received.peer, message)
                case Sample():
                    why = self._sampling_leases.ask(received.peer, message, now)
                case _:
                    raise WireError(f"this hub does not accept a {type(message).__name__.lower()}")
            if why:
                return [Refused(why)]
        return []
