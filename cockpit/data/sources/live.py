"""Live source: a thread that owns the client of a run's hub."""

import queue
import threading
import time
from collections.abc import Sequence

from agents.client import Client
from agents.protocol import Preview, Update
from agents.requests import Request
from agents.state.run_state import RunState
from agents.transport.curve_keys import Key
from cockpit.data.sources.connection import rate_hz, request_low_bandwidth
from cockpit.data.sources.detail import DetailReader
from cockpit.data.sources.source import ViewerError, faults_reported, viewer_text
from cockpit.data.store import Store

POLL_S = 0.1
REJOIN_S = 10.0  # after this long, the state of a restarted hub is shown even if some ranks are missing
PART = 256  # number of updates for which the store is locked, which takes a few ms
GAP_S = 0.0005  # pause between two parts, in which a waiting screen gets the lock and the interpreter


def note_in_parts(store: Store, updates: Sequence[Update]) -> None:
    """Pass the updates that the client has applied to the state to `store.note` in batches. The store is locked for one
    batch at a time, so a key press does not wait for the updates of thousands of ranks.
    """
    for first in range(0, len(updates), PART):
        if first:
            time.sleep(GAP_S)
        with store.lock:
            store.note(updates[first : first + PART])


def _has_rejoined(new: RunState, old: RunState, rebuilt_s: float) -> bool:
    """Whether the screen can show `new`, the state since a restart of the hub, instead of `old`, the state before it.
    After a restart, the ranks join again within seconds; until then, the screen continues to show the old state, with
    its age. If no rank joins, for example because the run has ended, the screen keeps the old state."""
    if len(new.hellos) >= len(old.hellos):
        return True
    return bool(new.hellos) and time.monotonic() - rebuilt_s > REJOIN_S


class LiveSource:
    """Source that follows a run's hub. One thread owns the client and takes requests from a queue."""

    owns_run = False

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
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._samples: frozenset[str] = frozenset()  # kinds of samples that the screen shows
        self._preview_id = ""  # id of the newest preview query
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Store | None = None
        self._detail = DetailReader(target)

    def start(self, store: Store) -> None:
        self._store = store
        self._detail.start(store)
        self._thread = threading.Thread(target=self._run, args=(store,), name="cockpit-live", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._detail.stop()
        if self._thread:
            self._thread.join(2.0)

    def sample(self, kinds: frozenset[str]) -> None:
        self._samples = kinds

    def ask(self, asked: Request) -> None:
        if not self.operator and not isinstance(asked, Preview):
            raise ViewerError(viewer_text(self))
        if self._store and self._store.fault:
            raise ViewerError(f"this cockpit is detached; {self._store.fault.how_to_continue}")
        self._requests.put(asked)

    def _run(self, store: Store) -> None:
        with faults_reported(store, f"the run continues: cockpit attach {self.target}"):
            self._follow(store)

    def _follow(self, store: Store) -> None:
        client = Client(self._endpoint, self._key, store.lock)
        store.rank_records = not self._low_bandwidth
        if self._low_bandwidth:
            request_low_bandwidth(client)
        resets = client.resets
        rebuilt_s: float | None = None  # when the client rebuilt the state that the store has not adopted yet
        requested: frozenset[str] = frozenset()
        updates: list[Update]
        try:
            while not self._stop.is_set():
                if self._samples != requested and not self._low_bandwidth:
                    requested = self._samples
                    client.request_samples(*sorted(requested))
                found, updates = client.changes(POLL_S), []
                with store.lock:
                    if client.resets != resets:
                        resets = client.resets
                        if not self._low_bandwidth and (hz := rate_hz(client.state.world)):
                            client.set_subscription(hz)
                        rebuilt_s = rebuilt_s or time.monotonic()
                    if rebuilt_s is None:
                        updates = list(found)
                    elif _has_rejoined(client.state, store.state, rebuilt_s):
                        store.adopt(client.state)  # this state includes the updates
                        rebuilt_s = None
                    if rebuilt_s is None:
                        store.set_message_age(client.age_s, client.behind_s)
                    store.loading, store.unanswered = client.loading, client.age_s is None
                    store.refused = client.refused
                    store.set_answers(client.previews, client.denied)
                note_in_parts(store, updates)
                while not self._requests.empty():
                    self._send(self._requests.get(), client)
        finally:
            client.close()

    def _send(self, asked: Request, client: Client) -> None:
        if isinstance(asked, Preview):
            client.withdraw(self._preview_id)
            self._preview_id = asked.id
        try:
            client.request(asked)
        except ValueError as error:
            client.denied[asked.id] = str(error)
