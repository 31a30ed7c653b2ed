"""How the ranks of a loop that is not ours come to one hub: rank 0 starts it, on its machine."""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.loop.vote import LEADER, Agree
from agents.rundir.hub_supervisor import Reach, between_machines, hub_of, kept, listening, named_hub, reach
from agents.rundir.local_machine import this_host
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import check_socket_directory, endpoints_in
from agents.transport.addresses import Endpoints

log = logging.getLogger("agents")

# What launchers call a rank's number on its machine.
LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def endpoint_for(
    stack: ExitStack, hub: str, run: str, run_dir: Path | None, rank: int, world: int, agree: Agree | None
) -> Reach | None:
    """How this rank reaches the hub; None: not at all. On `stack`, what ends the hub that this rank has started.

    Raises RunError for a `hub` that cannot be; OSError for a `run_dir` that cannot.
    """
    runs_dir = Path(os.environ.get("COCKPIT_RUNS", "runs"))
    if hub != "auto":
        return named_hub(hub, run_dir or runs_dir / run)
    if world == 1 or agree:
        folder = run_dir or runs_dir / f"{run}-{time.strftime('%Y%m%d-%H%M%S')}"
        if world > 1 and agree:
            return _met(stack, run, folder, rank, agree)
        return _start(stack, run, folder, None)[0]
    # Nobody can be told anything: what all ranks know is the folder, so the sockets' place follows from it.
    folder = run_dir or runs_dir / run
    sockets = _sockets_of(folder)
    return _start(stack, run, folder, sockets)[0] if rank == LEADER else reach(endpoints_in(sockets))


def _start(
    stack: ExitStack, run: str, folder: Path, sockets: Path | None, listen: str | None = None
) -> tuple[Reach | None, Endpoints | None]:
    """How this rank reaches the hub that it starts, and where that listens over TCP."""
    folder.mkdir(parents=True, exist_ok=True)
    mine, keeper = stack.enter_context(hub_of("auto", run, folder, sockets, listen))
    tcp = listening(keeper, folder) if keeper and listen else None
    stack.enter_context(kept(keeper))
    return mine, tcp


class _Word(Struct, array_like=True, frozen=True):
    """What rank 0 says of its hub."""

    ipc: str | None = None
    tcp: Endpoints | None = None
    why: str = ""  # it does not listen for other machines


def _met(stack: ExitStack, run: str, folder: Path, rank: int, agree: Agree) -> Reach | None:
    """Rank 0 starts the hub and tells the others: they reach it over ipc on its machine, over TCP from elsewhere."""
    hosts = [said.decode(errors="replace") for said in agree(this_host().encode())]
    elsewhere = next((host for host in hosts if host != hosts[LEADER]), None)
    word, problem = _Word(), None
    if rank == LEADER:
        try:
            word = _lead(stack, run, folder, elsewhere)
        except (RunError, OSError) as error:  # told, or the others would wait for a word
            word, problem = _Word(why=str(error)), error
    word = msgspec.msgpack.decode(agree(msgspec.msgpack.encode(word))[LEADER], type=_Word)
    if problem:
        raise problem
    if this_host() == hosts[LEADER]:
        return Reach(word.ipc) if word.ipc else None
    if word.tcp is None:
        log.warning("the hub runs on %s, and this rank goes without: %s", hosts[LEADER], word.why)
        return None
    return reach(word.tcp)


def _lead(stack: ExitStack, run: str, folder: Path, elsewhere: str | None) -> _Word:
    listen, why = None, ""
    if elsewhere is not None:
        try:
            listen = between_machines(os.environ.get("MASTER_ADDR") or elsewhere)
        except RunError as error:
            why = str(error)
    mine, tcp = _start(stack, run, folder, None, listen)
    return _Word(mine.endpoint if mine else None, tcp, why)


def _sockets_of(folder: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    sockets = Path(tempfile.gettempdir()) / f"cockpit-{os.getuid()}-{digest}"
    check_socket_directory(sockets)  # ours alone: someone else may have guessed its name
    return sockets


def speaks_for_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first rank of its machine, or nobody says."""
    known = next((environ[name] for name in LOCAL_RANK if name in environ), "0")
    return known == "0"
