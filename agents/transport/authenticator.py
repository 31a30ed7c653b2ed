"""ZAP authenticator: decides which CURVE keys may connect. The authenticator reads the list of keys, and rereads it
when the file changes.

A CURVE socket without ZAP accepts any key. The authenticator has its own thread, which also reads the list, so that a
key folder on a slow network disk does not block the hub.

pyzmq's authenticators (`zmq.auth`) are not used, for two reasons. The thread of a pyzmq authenticator waits for
requests without a time limit, so it would not notice a revoked key while no peer connects. The callback of a pyzmq
authenticator does not receive the peer's address and cannot set the text of the refusal, so the hub could not report
which peer was refused and why.
"""

import errno
import os
import threading
from collections import deque
from pathlib import Path

import zmq
from zmq.utils import z85

from agents.protocol.base import RunError
from agents.transport.curve_keys import LIST_FILE, KeyStore, Listed

DOMAIN = b"hub"
REREAD_S = 0.25
REFUSALS_KEPT = 16  # maximum number of reports kept until the hub publishes them
ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class ZapAuthenticator:
    """Answers ZAP requests according to the list of allowed keys. `grant` is called for every message, so it only reads
    a dict."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], store: KeyStore) -> None:
        # Refused keys and errors in reading the list, kept until the caller removes them.
        self.problems: deque[str] = deque(maxlen=REFUSALS_KEPT)
        self._store = store
        self._by_key: dict[bytes, Listed] = {}
        self._read: tuple[int, int, int] | None = None
        self._stopping = threading.Event()
        self._reread()
        # Bound before any CURVE socket, because a CURVE socket without ZAP accepts every key.
        self._zap = context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._work, name="zap", daemon=True)
        self._thread.start()

    def known(self, key: bytes) -> Listed | None:
        """The entry of a public key (Z85) in the list of keys, even if the key is revoked; None if the key is not in
        the list."""
        return self._by_key.get(key)

    def grant(self, key: bytes) -> Listed | None:
        """The entry of a public key in the list of allowed keys; None if the key is not in the list or is revoked."""
        row = self._by_key.get(key)
        return row if row is not None and row.revoked_s is None else None

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    # ----------------------------------------------------------------------------- in the authenticator's thread

    def _work(self) -> None:
        while not self._stopping.is_set():
            if self._zap.poll(int(1000 * REREAD_S)):
                request = self._zap.recv_multipart()
                self._reread()  # read the list again if it has changed, because the key may be new
                self._zap.send_multipart(self._answer(request))
            self._reread()
        self._zap.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to a ZAP request. A request has the parts version, request id, domain, address, identity, mechanism
        and credentials (RFC 27)."""
        version, asked, domain, address, _, mechanism, *credentials = request
        refusal = "not CURVE"
        if (domain, mechanism) == (DOMAIN, b"CURVE") and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0])
            if self.grant(key):
                return [version, asked, b"200", b"OK", key, b""]
            row = self.known(key)
            refusal = f"the key {row.name} is revoked" if row else "a key that is not listed"
        self.problems.append(f"{refusal}: refused, from {address.decode(errors='replace')}")
        return [version, asked, b"400", refusal.encode(), b"", b""]

    def _reread(self) -> None:
        path = self._store.folder / LIST_FILE
        found = _signature(path)
        if found == self._read:
            return
        try:
            rows = self._store.listed()
        except (RunError, OSError) as error:
            rows = []  # accept no key, because another user may have changed the list
            self.problems.append(f"{error}; no key is accepted until the list can be read")
        self._by_key = {row.public.encode(): row for row in rows}
        self._read = found


def _signature(path: Path) -> tuple[int, int, int]:
    """A value that changes whenever the file is replaced or modified, or whenever its mode changes.

    The file is opened because an NFS client may cache the attributes of a path for a minute, but asks the server when a
    file is opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            return (0, 0, 0)
        found = path.stat()  # this process has too many open files, which is no reason to reject the list
    else:
        found = os.fstat(descriptor)
        os.close(descriptor)
    return (found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
