"""How the ranks of a loop that is not ours come to one hub: rank 0 starts it, on the machine they share."""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from agents.agreement import LEADER, Agree
from agents.keeper import Reach, hub_of, kept, named_hub, reach
from agents.runs import check_socket_directory, endpoints_in, this_host

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
        mine = _start(stack, run, folder, None) if rank == LEADER else None
        return _told(mine, agree) if agree and world > 1 else mine
    # Nobody can be told anything: what all ranks know is the folder, so the sockets' place follows from it.
    folder = run_dir or runs_dir / run
    sockets = _sockets_of(folder)
    return _start(stack, run, folder, sockets) if rank == LEADER else reach(endpoints_in(sockets))


def _start(stack: ExitStack, run: str, folder: Path, sockets: Path | None) -> Reach | None:
    folder.mkdir(parents=True, exist_ok=True)
    mine, keeper = stack.enter_context(hub_of("auto", run, folder, sockets))
    stack.enter_context(kept(keeper))
    return mine


def _told(mine: Reach | None, agree: Agree) -> Reach | None:
    """Rank 0 tells the others; over ipc, so those of its own machine."""
    said = agree(msgspec.msgpack.encode([this_host(), mine.endpoint if mine else None]))
    host, endpoint = msgspec.msgpack.decode(said[LEADER], type=tuple[str, str | None])
    if endpoint and host != this_host():
        log.warning("the hub runs on %s; between machines it needs keys, so this rank goes without", host)
        return None
    return Reach(endpoint) if endpoint else None


def _sockets_of(folder: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    sockets = Path(tempfile.gettempdir()) / f"cockpit-{os.getuid()}-{digest}"
    check_socket_directory(sockets)  # ours alone: someone else may have guessed its name
    return sockets


def speaks_for_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first rank of its machine, or nobody says."""
    known = next((environ[name] for name in LOCAL_RANK if name in environ), "0")
    return known == "0"
