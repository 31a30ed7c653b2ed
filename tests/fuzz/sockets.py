"""Fake ZeroMQ sockets: `recv` returns what the test provides, and sent frames are recorded."""

import time
from collections import deque
from typing import Any

import zmq

KEPT = 64


class Frame:
    """A fake `zmq.Frame` with the metadata that libzmq adds to a received frame, such as `User-Id`."""

    def __init__(self, data: bytes, properties: dict[str, str]) -> None:
        self.bytes = data
        self._properties = properties

    def get(self, name: str) -> str:
        return self._properties[name]


class Socket:
    """A fake socket of any type. `refuses`: the errno values with which the next sends fail, such as EAGAIN for a full
    queue."""

    def __init__(self, kind: int) -> None:
        self.kind = kind
        self.endpoint = ""
        self.came: deque[tuple[list[bytes], dict[str, str]]] = deque()
        self.sent: deque[list[bytes]] = deque(maxlen=KEPT)
        self.refuses: deque[int] = deque()
        self.closed = False
        self._parts: deque[Frame] = deque()  # remaining parts of the message that is being received

    def put(self, *frames: bytes, **properties: str) -> None:
        self.came.append((list(frames), properties))

    # ----------------------------------------------------------------------------------- interface of zmq.Socket

    def set(self, option: int, value: object) -> None: ...

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint

    connect = bind

    def disconnect(self, endpoint: str) -> None: ...

    unbind = disconnect

    def get_string(self, option: int) -> str:
        return self.endpoint.replace("*", "1024")

    def get_monitor_socket(self, events: int) -> "Socket":
        return Socket(zmq.PAIR)

    def disable_monitor(self) -> None: ...

    def close(self, linger: int | None = None) -> None:
        self.closed = True

    def poll(self, timeout: int | None = None, flags: int = zmq.POLLIN) -> int:
        if self.kind == zmq.REP and not self.came:
            time.sleep(0.01)  # the authenticator's thread polls repeatedly
        return zmq.POLLIN if self.came else 0

    def recv(self, flags: int = 0, copy: bool = True) -> Any:
        if not self._parts:
            if not self.came:
                raise zmq.Again
            frames, properties = self.came.popleft()
            self._parts.extend(Frame(one, properties) for one in frames)
        part = self._parts.popleft()
        return part.bytes if copy else part

    def get(self, option: int) -> int:
        assert option == zmq.RCVMORE
        return int(bool(self._parts))

    def recv_multipart(self, flags: int = 0, copy: bool = True) -> list[Any]:
        frames = [self.recv(flags, copy)]
        while self._parts:
            frames.append(self.recv(flags, copy))
        return frames

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        if self.refuses:
            number = self.refuses.popleft()
            raise zmq.Again if number == zmq.EAGAIN else zmq.ZMQError(number)
        self.sent.append([bytes(frame) for frame in frames])

    def send(self, frame: bytes, flags: int = 0) -> None:
        self.send_multipart([frame], flags)


class Context:
    """A fake `zmq.Context`; `sockets` are in order of creation."""

    def __init__(self) -> None:
        self.sockets: list[Socket] = []

    def socket(self, kind: int) -> Socket:
        self.sockets.append(Socket(kind))
        return self.sockets[-1]

    def set(self, option: int, value: object) -> None: ...

    def term(self) -> None: ...

    def destroy(self, linger: int | None = None) -> None: ...
