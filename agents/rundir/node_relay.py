"""Decides whether a job uses relays; local rank 0 starts and supervises the relay of its node.

All ranks of a node derive the path of the relay's socket from their environment, so they need not exchange data. A rank
whose relay does not start or is no longer restarted connects to the hub directly (`agents.transport.reach.Fallback`).
"""

import hashlib
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from agents.protocol.base import RunError
from agents.rundir.hub_supervisor import TICK_S, HubSupervisor, say
from agents.rundir.local_machine import Machine, this_host, this_machine
from agents.rundir.socket_directory import check_socket_directory, endpoints_in, remove_sockets
from agents.transport.addresses import Endpoints
from agents.transport.curve_keys import FOLDER_VARIABLE
from agents.transport.reach import Fallback, Reach

SETTING = "COCKPIT_RELAY"
SETTINGS = ("auto", "on", "off")

# Environment variables of launchers: torchrun, Slurm, Open MPI, MPICH. The first one that is set counts.
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")
NODE = ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID")
TASKS = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
# These are equal on all ranks of a job, and together they differ between two jobs on a node and between two starts.
JOB = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "PMIX_NAMESPACE",
)


class Place(NamedTuple):
    """What the launcher's environment variables say about a rank: its node and job, its number on the node, and the
    number of ranks on the node and in the job."""

    job: tuple[str, ...]  # the same on all ranks of the node, and different on other nodes and in other jobs
    local_rank: int
    local_world: int
    world: int

    @property
    def several_nodes(self) -> bool:
        return self.world > self.local_world


def place_of(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The node and job of this process; None if its environment does not say which ranks share a node."""
    job = tuple(environ.get(name, "") for name in JOB)
    node = _first(environ, NODE) or "0"
    tasks = tasks_per_node(_first(environ, TASKS) or "")
    listed = str(tasks[int(node)]) if node.isdecimal() and int(node) < len(tasks) else None
    numbers = _first(environ, LOCAL_RANK), _first(environ, LOCAL_WORLD) or listed, _first(environ, WORLD)
    local_rank, local_world, world = (
        int(number) if number and number.isdecimal() else None for number in numbers
    )
    if local_rank is None or local_world is None or world is None or not any(job):
        return None
    machine = Machine.parse(this_machine()).kernel
    return Place((*machine, this_host(), node, *job), local_rank, local_world, world)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environ[name] for name in names if environ.get(name)), None)


def tasks_per_node(listed: str) -> list[int]:
    """The number of tasks on each node, from Slurm's list, such as ``4(x2),3``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", listed)
    return [int(tasks) for tasks, times in found for _ in range(min(int(times or 1), 1 << 16))]


def wants_relay(place: Place | None, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the ranks of this node connect through a relay. Raises RunError if `COCKPIT_RELAY` is invalid."""
    setting = environ.get(SETTING) or "auto"
    if setting not in SETTINGS:
        raise RunError(f"{SETTING} = {setting!r} is not legal; legal: {', '.join(SETTINGS)}")
    if setting == "on" and place is None:
        say(
            f"{SETTING} = on, but the environment does not say which ranks share a node; this rank connects to the "
            "hub directly\n"
        )
    # With one rank on each node, a relay does not reduce the number of connections.
    automatic = place is not None and place.several_nodes and place.local_world > 1
    return place is not None and (setting == "on" or (setting == "auto" and automatic))


@contextmanager
def through_relay(
    reached: Reach | None, run: str, environ: Mapping[str, str] = os.environ
) -> Iterator[Reach | None]:
    """Yield the endpoint and key with which this rank connects to the hub: those of the relay on its node if the job
    uses relays, otherwise `reached`, those of the hub itself (None: the run has no hub). Local rank 0 starts the relay,
    and ends it when this context closes.

    Raises RunError if `COCKPIT_RELAY` is invalid.
    """
    place = place_of(environ)
    if reached is None or not wants_relay(place, environ) or place is None:
        yield reached
        return
    try:
        sockets = _directory_of(run, place)
        check_socket_directory(
            sockets
        )  # another user may have guessed the name and created the directory first
        endpoints = endpoints_in(sockets)
    except RunError as error:
        say(f"this rank connects to the hub without a relay: {error}\n")
        yield reached
        return
    first = place.local_rank == 0
    behind = Reach(endpoints.ranks, fallback=Fallback(reached, endpoints.paths[0], reports=first))
    if not first:
        yield behind
        return
    with _supervised(reached, run, endpoints):
        yield behind


def _directory_of(run: str, place: Place) -> Path:
    digest = hashlib.blake2b("\0".join((run, *place.job)).encode(errors="replace"), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"cockpit-relay-{os.getuid()}-{digest}"


def command_of(run: str, hub: Reach, sockets: Path) -> list[str]:
    """The command line that starts the relay; the relay ends when this process ends."""
    command = [sys.executable, "-m", "agents.hub.relay", f"--run={run}", "--hub", hub.endpoint]
    return [*command, "--sockets", str(sockets), "--parent", str(os.getpid())]


@contextmanager
def _supervised(hub: Reach, run: str, endpoints: Endpoints) -> Iterator[None]:
    """Run a relay that connects to `hub`. If the relay dies repeatedly, remove its sockets, so that its ranks no longer
    wait for it.
    """
    sockets = endpoints.directory
    log = sockets / "relay.log"
    keys = {FOLDER_VARIABLE: str(hub.keys)} if hub.keys else {}
    supervisor = HubSupervisor(command_of(run, hub, sockets), log, "relay", os.environ | keys)
    over = threading.Event()

    def end() -> None:
        supervisor.close()
        log.unlink(missing_ok=True)
        remove_sockets(endpoints)

    def supervise() -> None:
        while not over.wait(TICK_S):
            supervisor.tick()
            if supervisor.failing:
                say(f"the relay on {this_host()} ends repeatedly; its ranks connect to the hub directly")
                say(f": {_last_line(log)}\n")
                end()
                return

    endpoints.paths[0].unlink(missing_ok=True)  # of a relay that was killed together with its parent
    supervisor.start()
    thread = threading.Thread(target=supervise, name="relay-supervisor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            end()


def _last_line(log: Path) -> str:
    """The last line of the log that the relay itself wrote; the supervisor's lines begin with a date."""
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line and not line[:4].isdecimal()), "no message")
    return "no message"
