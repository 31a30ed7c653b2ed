"""The connections of an MCP server to one run. A thread keeps the state of a live run up to date; each request for a
change has a connection of its own, as on the command line.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from agents.client import whoami
from cockpit.cli.steer.steering import steering
from cockpit.data.sources.connection import CockpitError, Connection, address, target
from cockpit.data.sources.recorded import RunSnapshot, is_over, load_snapshot

UPDATE_HZ = 1.0  # how often the newest record of each rank is received
PAUSE_S = 0.05  # pause between two polls, in which a tool gets the lock


class Follower:
    """A connection that a thread polls until `stop` is called or the connection fails. If the connection has failed,
    `error` gives the reason."""

    def __init__(self, run: str) -> None:
        self.error = ""
        self.connection = Connection(run, watch_only=True)
        self.connection.client.set_subscription(UPDATE_HZ)
        try:
            self.connection.wait_for_snapshot()
        except CockpitError:
            if not self.connection.answered:
                self.connection.close()
                raise
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cockpit-mcp", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            while not self._stopping.wait(PAUSE_S):
                self.connection.poll()
        except CockpitError as error:
            self.error = str(error)
        finally:
            self.connection.close()

    def stop(self) -> None:
        """Close the connection."""
        self._stopping.set()
        self._thread.join(5.0)


class Session:
    """The run that an MCP server reads and changes, and the server's role and name. If `run` is None, the first tool
    call sets it to the newest live run."""

    def __init__(self, run: str | None, operator: bool, name: str) -> None:
        self.run = run
        self.operator = operator
        self.name = name
        self._follower: Follower | None = None
        self._starting = threading.Lock()

    @property
    def who(self) -> str:
        """The name under which the run's log records this server's changes: the server's name and `user@host:pid` of
        its process."""
        return f"{self.name} (mcp, {whoami()})"

    @property
    def over(self) -> bool:
        """Whether the run is over, so that only its recording can be read."""
        return self.run is not None and is_over(self.run)

    @contextmanager
    def view(self) -> Iterator[RunSnapshot]:
        """The newest state of the run, which does not change inside the `with` block."""
        run = self.chosen()
        if is_over(run):
            self.close()
            yield load_snapshot(run)
            return
        connection = self._following(run).connection
        with connection.store.lock:
            yield RunSnapshot(connection.store, connection.client.epoch, connection.client.seq)

    @contextmanager
    def requesting(self, words: Sequence[str] = ()) -> Iterator[Connection]:
        """A connection for one request, with this server's role; if `operator` is False, the hub refuses changes."""
        with steering(self.chosen(), words, self.operator, watch_only=not self.operator) as connection:
            yield connection

    def close(self) -> None:
        """Stop following the run."""
        with self._starting:
            follower, self._follower = self._follower, None
        if follower:
            follower.stop()

    def chosen(self) -> str:
        """The run that all requests of this server refer to. Without a named run, the newest live run is chosen once
        and then kept; a server that may change runs needs the run's name if several are live."""
        if self.run is None:
            address(None)  # raises an error if no run is live
            self.run = target(None, changing=self.operator)
        return self.run

    def _following(self, run: str) -> Follower:
        with self._starting:
            if self._follower is None or self._follower.error:
                self._follower = Follower(run)
            return self._follower
