"""Reads the frames that a hub receives, up to a limit per socket; checks each frame against the peer's role, and passes
it to `Ingest` (from ranks) or `ClientRequests` (from clients).
"""

import time

import zmq

from agents.hub import client_requests
from agents.hub.client_requests import ClientRequests
from agents.hub.ingest import Ingest
from agents.hub.telemetry.peer_faults import PeerFaults
from agents.protocol import AnyMessage, Message, Refused, WireError, clip, codec
from agents.transport.roles import ANSWERED, Role, refusal
from agents.transport.server_sockets import Received, ServerSocket, ServerSockets

# Maximum number of frames from one socket per round, so that other sockets and the clients are also served.
FRAMES_PER_ROUND = 1024
DRAIN_S = 0.01  # maximum time for one socket per round, because some frames take longer than others


class ReceivedFrames:
    """Handles the frames of all peers. `count`: number of frames handled in the latest call of `drain_all`.
    `cut_short`: whether a limit ended that call, so that some frames may not have been read yet."""

    def __init__(
        self, sockets: ServerSockets, ingest: Ingest, requests: ClientRequests, peer_faults: PeerFaults
    ) -> None:
        self.count = 0
        self.cut_short = False  # whether a socket had more frames than the limit of the round
        self._sockets, self._ingest, self._requests = sockets, ingest, requests
        self._peer_faults = peer_faults

    def drain_all(self, now_s: float) -> int:
        """Handle the frames that have arrived, up to a limit per socket; returns their number. `now_s`: seconds since
        the hub started.
        """
        self.count, self.cut_short = 0, False
        for server_socket in self._sockets:
            self.count += self.drain(server_socket, now_s)
        return self.count

    def drain(self, server_socket: ServerSocket, now_s: float) -> int:
        """Handle the frames that have arrived on one socket, for at most `DRAIN_S` seconds and `FRAMES_PER_ROUND`
        frames; returns their number."""
        taken = 0
        until = time.monotonic() + DRAIN_S
        try:
            while taken < FRAMES_PER_ROUND and (not taken or time.monotonic() < until):
                received = server_socket.receive()
                taken += 1
                for answer in self._take(received, now_s):
                    self._sockets.answer(received.peer, codec.encode([answer]))
            self.cut_short = True
        except zmq.Again:
            pass
        self._ingest.flush()
        return taken

    def _take(self, received: Received, now_s: float) -> list[Message]:
        try:
            if len(received.frames) != 1:
                raise WireError(f"a message has one frame, and this one has {len(received.frames)}")
            (frame,) = received.frames
            if received.role is Role.RANK and self._ingest.take_records(received.peer, frame, now_s):
                return []
            # From a rank, only the malformed message is skipped; from a client, the whole frame is refused.
            decode = codec.decode_each if received.role is Role.RANK else client_requests.decode
            messages = decode(frame)
            answers = self._unauthorized(received, messages)
            if answers is None and received.role is Role.RANK:
                answers = self._ingest.take(received.peer, messages, now_s)
            elif answers is None:
                answers = self._requests.take(received, messages)
        except WireError as error:
            self._peer_faults.add("frame", f"a peer sent a frame that was dropped: {error}")
            answers = [Refused(clip(str(error)))]
        return [
            one
            for one in answers
            if not isinstance(one, Refused) or self._peer_faults.may_refuse(received.peer)
        ]

    def _unauthorized(self, received: Received, messages: list[AnyMessage]) -> list[Message] | None:
        """The refusal if the peer's role does not allow one of the messages; None if all are allowed."""
        if received.role is Role.RANK and not received.name:
            return None
        for message in messages:
            why = refusal(received.role, received.name, message)
            if why is None:
                continue
            self._peer_faults.add("key", why)
            return [Refused(why, request_id=message.id if isinstance(message, ANSWERED) else "")]
        return None
