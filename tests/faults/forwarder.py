"""A forwarder for TCP or Unix sockets with which a test can simulate network faults."""

import contextlib
import os
import socket
import tempfile
import threading
from pathlib import Path

Address = str | tuple[str, int]


def _address(endpoint: str) -> tuple[socket.AddressFamily, Address]:
    scheme, _, place = endpoint.partition("://")
    if scheme == "ipc":
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    return socket.AF_INET, (host, int(port))


class Forwarder:
    """Forwards bytes between its own `endpoint` and `target`, both of which are ``ipc://`` or ``tcp://`` URLs.

    `cut` is a partition: no data are forwarded, but connections stay open. After `heal`, the data sent since `cut` are
    delivered, as with TCP after a network partition. `tear` ends every connection.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._passes = threading.Event()
        self._passes.set()
        self._sockets: list[socket.socket] = []
        self._folder: Path | None = None
        family, _ = _address(target)
        self._listening = socket.socket(family)
        if family == socket.AF_UNIX:
            self._folder = Path(tempfile.mkdtemp(prefix="cable-"))
            self._listening.bind(str(self._folder / "end"))
            self.endpoint = f"ipc://{self._folder / 'end'}"
        else:
            self._listening.bind(("127.0.0.1", 0))
            self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._listening.listen(1024)
        threading.Thread(target=self._accept, name="cable", daemon=True).start()

    def cut(self) -> None:
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    def tear(self) -> None:
        ended, self._sockets = self._sockets, []
        for one in ended:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._passes.set()
        self.tear()
        if self._folder:
            (self._folder / "end").unlink(missing_ok=True)
            os.rmdir(self._folder)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                self._passes.wait()
                self._connect(here)

    def _connect(self, here: socket.socket) -> None:
        family, address = _address(self._target)
        there = socket.socket(family)
        try:
            there.connect(address)
        except OSError:  # the target does not listen now, so close the connection
            here.close()
            return
        self._sockets += [here, there]
        for source, sink in ((here, there), (there, here)):
            threading.Thread(target=self._pass, args=(source, sink), name="cable", daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(received)
            sink.shutdown(socket.SHUT_WR)
