"""Finding a run and talking to its hub, for scripts and screens alike. Textual-free."""

import os
import time
from pathlib import Path
from typing import NamedTuple

from agents.client import Client
from agents.rundir.runs import RunError, list_runs, newest_live, resolve
from agents.transport.addresses import Endpoints, is_tcp
from agents.transport.keys import Key, Role, find_key, key_folder
from cockpit.data.store import Store

ANSWER_S = 5.0
RESTART_S = 5.0  # a hub that was killed is back well before
POLL_S = 0.2


class CockpitError(Exception):
    """Something the person at the keyboard can put right; the text is one sentence."""


def runs_dir() -> Path:
    """Where runs lie: ``runs`` of the directory one is in, unless COCKPIT_RUNS names another."""
    return Path(os.environ.get("COCKPIT_RUNS", "runs"))


class Address(NamedTuple):
    """Where a run's hub listens for watchers; over TCP, with the key to come under."""

    endpoint: str
    key: Key | None = None


def address(run: str | None, operator: bool = False, key_file: Path | None = None) -> Address:
    """Of a run named by name, folder or URL, None for the newest live; `operator`: who will change it, too."""
    try:
        found = _resolved(run)
        if not is_tcp(found.clients):
            return Address(found.clients)
        roles = (Role.OPERATOR,) if operator else (Role.VIEWER, Role.OPERATOR)
        return Address(found.clients, find_key(roles, key_file, key_folder(found), found.hub))
    except RunError as error:
        raise CockpitError(str(error)) from None


def _resolved(run: str | None) -> Endpoints:
    """The run's hub; one that was killed is waited for. RunError: there is none."""
    deadline = time.monotonic() + RESTART_S
    while True:
        back = _may_be_back(run)  # before too: it may be back just after it was found to be dead
        try:
            return resolve(run, runs_dir())
        except RunError:
            if time.monotonic() >= deadline or not (back or _may_be_back(run)):
                raise
        time.sleep(0.1)


def _may_be_back(run: str | None) -> bool:
    """Whether the hub meant was killed and has left its sockets: whoever keeps it starts it again on them."""
    known = list_runs(runs_dir())
    if run is not None:
        meant = Path(run).resolve()
        known = [
            one
            for one in [*known, *list_runs(meant.parent)]
            if one.name == run or one.folder.resolve() == meant
        ]
    return any(one.hub and not one.live and one.hub.endpoints.directory.is_dir() for one in known)


def target(run: str | None) -> str:
    """The same run, by a name that will still mean it later."""
    if run is not None:
        return run
    newest = newest_live(runs_dir())
    return newest.name if newest else "RUN"


CROWD = 256  # ranks from which on a screen is sent only the newest of each, so many times a second
CROWD_HZ = 4.0
LOW_HZ = 1.0  # and nothing of single ranks: for a thin line to a large run
LOW_FRAME_BYTES = 32 << 10


def want_little(client: Client) -> None:
    """Ask for what a thin line carries: the job's own records, once a second."""
    client.want(LOW_HZ, ranks=False, frame_bytes=LOW_FRAME_BYTES)


class Connection:
    """A client with a store beside it, for commands that look once or follow along."""

    def __init__(self, run: str | None, operator: bool = False, low_bandwidth: bool = False) -> None:
        self.store = Store(time.monotonic)
        self.client = Client(*address(run, operator), self.store.lock)
        if low_bandwidth:
            want_little(self.client)
        self._resets = 0

    def poll(self, timeout_s: float = POLL_S) -> bool:
        """Take what there is; True if the store was built anew from a snapshot."""
        updates = self.client.poll(timeout_s)
        anew = self.client.resets != self._resets
        with self.store.lock:
            if anew:
                self._resets = self.client.resets
                self.store.adopt(self.client.state)
            else:
                self.store.note(updates)
            self.store.heard(self.client.age_s)
        self.last = updates
        if self.client.refused:
            raise CockpitError(self.client.refused)
        return anew

    def until_known(self, timeout_s: float = ANSWER_S) -> None:
        """Wait for the first snapshot with a rank and its board in it."""
        deadline = time.monotonic() + timeout_s
        while not (self._resets and self.store.state.hellos and self.store.state.board):
            if time.monotonic() > deadline:
                raise CockpitError(self._why_nothing(timeout_s))
            self.poll()

    @property
    def answered(self) -> bool:
        """The hub has told what it knows, if only that no rank is there."""
        return self._resets > 0

    def _why_nothing(self, timeout_s: float) -> str:
        if self.client.age_s is None:
            return f"no hub answered at {self.client.endpoint} within {timeout_s:g} s"
        return "the hub answers, but no rank has reported to it yet; ask again when the run has started"

    def close(self) -> None:
        self.client.close()
