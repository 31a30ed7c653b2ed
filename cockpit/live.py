"""A run's hub as a feed: the one thread that owns the client."""

import queue
import threading
import uuid
from collections.abc import Mapping

from agents.client import Client
from agents.reach.keys import Key
from agents.wire import Value
from cockpit.connect import CROWD, CROWD_HZ, want_little
from cockpit.feed import ViewerError
from cockpit.store import Store

POLL_S = 0.1


class LiveFeed:
    """A run's hub. One thread owns the client; proposals reach it through a queue."""

    def __init__(
        self,
        endpoint: str,
        operator: bool = False,
        target: str = "RUN",
        key: Key | None = None,
        low_bandwidth: bool = False,
    ) -> None:
        self.operator = operator
        self.target = target
        self._endpoint = endpoint
        self._key = key
        self._low_bandwidth = low_bandwidth
        self._wishes: queue.SimpleQueue[tuple[str, dict[str, Value], int | None]] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None

    def start(self, store: Store) -> None:
        self._store = store
        self._thread = threading.Thread(target=self._drain, args=(store,), name="cockpit-feed", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2.0)

    def propose(self, changes: Mapping[str, Value], base: int | None) -> str:
        if not self.operator:
            raise ViewerError("this cockpit only watches")
        wish = uuid.uuid4().hex
        self._wishes.put((wish, dict(changes), base))
        return wish

    def _drain(self, store: Store) -> None:
        client = Client(self._endpoint, self._key)
        if self._low_bandwidth:
            want_little(client)
        else:
            client.look("experts", "timeline")  # what the overview draws
        resets = client.resets
        try:
            while not self._stop.is_set():
                updates = client.poll(POLL_S)
                with store.lock:
                    if client.resets != resets:
                        resets = client.resets
                        if client.state.world >= CROWD and not self._low_bandwidth:
                            client.want(CROWD_HZ)
                        store.rebuild(client.state.replay())
                    elif updates:
                        store.apply(updates)
                    store.heard(client.age_s)
                    store.refused = client.refused
                while not self._wishes.empty():
                    wish, changes, base = self._wishes.get()
                    client.propose(changes, base_revision=base, id=wish)
        finally:
            client.close()
