"""Finds the address of a run's hub, and connects a command to the hub."""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from agents.client import Client
from agents.rundir.runs import RunError, find_folder, list_runs, newest_live, only_live, resolve
from agents.transport.addresses import Endpoints, is_tcp
from agents.transport.curve_keys import Key, find_key, key_folder
from agents.transport.roles import Role
from cockpit.data.sources.ssh_sockets import forwarded_endpoints, is_ssh
from cockpit.data.store import Store

ANSWER_S = 5.0
RESTART_S = 5.0  # a hub that was killed is restarted well within this time
POLL_S = 0.2


class CockpitError(Exception):
    """An error that the user can correct; the message is one sentence."""


def runs_dir() -> Path:
    """The folder of runs, from the environment variable COCKPIT_RUNS; if it is unset or empty, ``runs`` in the current
    directory."""
    return Path(os.environ.get("COCKPIT_RUNS") or "runs")


class Address(NamedTuple):
    """The endpoint on which a hub listens for clients, and this client's key. `key` is None if the endpoint is a Unix
    socket on this machine."""

    endpoint: str
    key: Key | None = None


def address(
    run: str | None, operator: bool = False, key_file: Path | None = None, watch_only: bool = False
) -> Address:
    """The address of the hub of a run, which is given by name, folder or URL (None: the newest live run). `operator`:
    whether the key must have the role operator. `watch_only`: use only read-only access, which is the hub's socket for
    viewers or a key with the role viewer; the hub then refuses every change."""
    try:
        found = _resolved(run)
        if not is_tcp(found.clients) and not found.hub:
            return Address(_local_endpoint(found, operator, watch_only))
        roles = (Role.OPERATOR,) if operator else (Role.VIEWER, Role.OPERATOR)
        if watch_only:
            roles = (Role.VIEWER,)
        return Address(found.clients, find_key(roles, key_file, key_folder(found), found.hub))
    except RunError as error:
        raise CockpitError(str(error)) from None


def endpoints(run: str | None) -> Endpoints:
    """The endpoints of the run's hub, as `address` finds them. Raises CockpitError."""
    try:
        return _resolved(run)
    except RunError as error:
        raise CockpitError(str(error)) from None


def _local_endpoint(hub: Endpoints, operator: bool, watch_only: bool) -> str:
    """The ipc endpoint for a client. A hub of an earlier release has no socket for viewers; the client then uses the
    socket `clients`, or if `watch_only` is set, CockpitError is raised.
    """
    if not operator and hub.viewers and Path(hub.viewers.removeprefix("ipc://")).exists():
        return hub.viewers
    if watch_only:
        why = "no hub listens there, or the hub is of an earlier release"
        raise CockpitError(f"there is no socket for viewers beside {hub.clients}: {why}")
    return hub.clients


def _resolved(run: str | None) -> Endpoints:
    """The endpoints of the run's hub. If the hub was killed, wait for its restart. Raises RunError if the run has no
    hub.
    """
    if run is not None and is_ssh(run):
        found = forwarded_endpoints(run)
        if found is None:
            raise RunError(f"this command cannot reach {run}; run it on that machine")
        return found
    deadline = time.monotonic() + RESTART_S
    while True:
        # check before `resolve` too: the hub may restart just after `resolve` fails
        restarting = _may_restart(run)
        try:
            return resolve(run, runs_dir())
        except RunError:
            if time.monotonic() >= deadline or not (restarting or _may_restart(run)):
                raise
        time.sleep(0.1)


def _may_restart(run: str | None) -> bool:
    """Whether the run's hub was killed but its sockets remain; the supervisor then restarts the hub."""
    runs = list_runs(runs_dir())
    if run is not None:
        try:
            folder = find_folder(run, runs_dir())
        except RunError:
            return False
        runs = [one for one in list_runs(folder.parent) if one.name == folder.name]
    return any(one.hub and not one.live and one.hub.endpoints.directory.is_dir() for one in runs)


def target(run: str | None, changing: bool = False) -> str:
    """`run` or, if it is None, the name of the newest live run; the name refers to the same run even after a newer run
    starts. `changing`: raise CockpitError if several runs are live."""
    if run is not None:
        return run
    try:
        newest = only_live(runs_dir()) if changing else newest_live(runs_dir())
    except RunError as error:
        raise CockpitError(str(error)) from None
    return newest.name if newest else "RUN"


MANY_RANKS = 256  # with this many ranks or more, a screen receives only the latest record of each rank
RECORDS_PER_S = 4096.0  # records of all ranks together; reading them takes about a tenth of a core
MOST_HZ, LEAST_HZ = 4.0, 0.5
LOW_HZ = 1.0  # rate over a slow connection, without per-rank records
LOW_FRAME_BYTES = 32 << 10


def rate_hz(world: int) -> float:
    """How many times per second a screen receives the latest records of `world` ranks; 0 means every update."""
    return 0.0 if world < MANY_RANKS else min(MOST_HZ, max(LEAST_HZ, RECORDS_PER_S / world))


def request_low_bandwidth(client: Client) -> None:
    """Request only job-wide records, once a second."""
    client.set_subscription(LOW_HZ, ranks=False, frame_bytes=LOW_FRAME_BYTES)


class Connection:
    """A client and the store that the client fills, for commands without a screen. As a context manager, it closes the
    client at the end."""

    def __init__(
        self,
        run: str | None,
        operator: bool = False,
        low_bandwidth: bool = False,
        watch_only: bool = False,
    ) -> None:
        self.store = Store(time.monotonic)
        self.store.rank_records = not low_bandwidth
        if run is None and (newest := newest_live(runs_dir())):
            run = newest.name
        self.client = Client(*address(run, operator, watch_only=watch_only), self.store.lock)
        if run is not None and "://" not in run:
            with contextlib.suppress(RunError):  # it has ended just now
                self.store.folder = find_folder(run, runs_dir()).resolve().name
        if low_bandwidth:
            request_low_bandwidth(self.client)
        self._resets = 0

    def poll(self, timeout_s: float = POLL_S) -> bool:
        """Receive updates, apply them to the store, and keep them in `last`. Return True if a snapshot replaced the
        store's state."""
        updates = self.client.poll(timeout_s)
        rebuilt = self.client.resets != self._resets
        with self.store.lock:
            if rebuilt:
                self._resets = self.client.resets
                self.store.adopt(self.client.state)
            else:
                self.store.note(updates)
            self.store.set_message_age(self.client.age_s, self.client.behind_s)
        self.last = updates
        if self.client.refused:
            raise CockpitError(self.client.refused)
        return rebuilt

    def wait_for_snapshot(self, timeout_s: float = ANSWER_S) -> None:
        """Wait for a snapshot that contains at least one rank and the knob board."""
        deadline = time.monotonic() + timeout_s
        while not (self._resets and self.store.state.hellos and self.store.state.board):
            if time.monotonic() > deadline:
                raise CockpitError(self._timeout_text(timeout_s))
            self.poll()

    @property
    def answered(self) -> bool:
        """Whether the hub has sent a snapshot, even one without ranks."""
        return self._resets > 0

    def _timeout_text(self, timeout_s: float) -> str:
        if self.client.age_s is None:
            return f"no hub answered at {self.client.endpoint} within {timeout_s:g} s"
        return "the hub answers, but no rank has joined the run yet; try again when the run has started"

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client."""
        self.client.close()
