"""Connects all ranks of a training loop to one hub, which rank 0 starts on its machine."""

import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.loop.vote import Agree
from agents.rank.vote import LEADER
from agents.rundir.hub_file import check_unserved
from agents.rundir.hub_supervisor import between_machines, hub_of, kept, listening, named_hub, reach
from agents.rundir.local_machine import this_file_system, this_host
from agents.rundir.node_relay import LOCAL_RANK, through_relay
from agents.rundir.run_folder import make_folder, stamped
from agents.rundir.runs import RunError, folder_name, remove_unrecorded
from agents.rundir.socket_directory import check_socket_directory, endpoints_in, socket_answers
from agents.rundir.standard_streams import patiently
from agents.transport.addresses import Endpoints
from agents.transport.reach import Reach

log = logging.getLogger("agents")

ANSWERS_S = 5.0


def endpoint_for(
    stack: ExitStack, hub: str, run: str, run_dir: Path | None, rank: int, world: int, agree: Agree | None
) -> Reach | None:
    """The endpoint and key with which this rank connects to the hub, or to the relay on its node that forwards messages
    to the hub; None without a hub. If this rank starts the hub or the relay, closing `stack` ends it.

    Raises RunError if `hub` is invalid, or if `run_dir` cannot be created or is in use.
    """
    reached = _hub_for(stack, hub, run, run_dir, rank, world, agree)
    return stack.enter_context(through_relay(reached, run)) if world > 1 else reached


def _hub_for(
    stack: ExitStack, hub: str, run: str, run_dir: Path | None, rank: int, world: int, agree: Agree | None
) -> Reach | None:
    runs_dir = Path(os.environ.get("COCKPIT_RUNS") or "runs")
    named = folder_name(run)
    if hub != "auto":
        return named_hub(hub, run_dir or runs_dir / named)
    folder = run_dir or stamped(runs_dir, named)
    if world > 1 and agree:
        return _share_hub(stack, run, folder, run_dir is None, rank, agree)
    if world == 1:
        return _start(stack, run, folder, None, None, run_dir is None)[0]
    # Without `agree`, the ranks cannot exchange data, so each rank derives the path of the sockets from the run folder.
    folder = run_dir or runs_dir / named
    sockets = _sockets_for(folder)
    return _start(stack, run, folder, sockets)[0] if rank == LEADER else reach(endpoints_in(sockets))


def _start(
    stack: ExitStack,
    run: str,
    folder: Path,
    sockets: Path | None,
    listen: str | None = None,
    new: bool = False,
) -> tuple[Reach | None, Endpoints | None]:
    """Start a hub in `folder`, or in a folder with a similar name if `new` is set and this one exists. Returns the
    endpoint and key for this rank, and the hub's TCP endpoints if it listens on TCP. Raises RunError if the hub of
    another job uses the folder.
    """
    folder = make_folder(None if new else folder, folder)
    check_unserved(folder)
    if new:
        stack.callback(remove_unrecorded, folder)
    own, supervisor = stack.enter_context(hub_of("auto", run, folder, sockets, listen))
    tcp = listening(supervisor, folder) if supervisor and listen else None
    stack.enter_context(kept(supervisor))
    return own, tcp


class _Place(Struct, array_like=True, frozen=True):
    """Where a rank runs. Two machines may have the same host name, so only `files` shows whether ranks can share Unix
    sockets."""

    host: str
    files: str  # `this_file_system`


class _HubAddress(Struct, array_like=True, frozen=True):
    """The addresses of the hub that rank 0 started: over ipc for ranks on the same machine, over TCP for other
    machines."""

    ipc: str | None = None
    tcp: Endpoints | None = None
    why: str = ""  # why other machines cannot connect to the hub


def _share_hub(stack: ExitStack, run: str, folder: Path, new: bool, rank: int, agree: Agree) -> Reach | None:
    """On rank 0, start the hub and send its address to all ranks. Ranks on the same machine use ipc; the other ranks
    use TCP. A rank in another container of the machine uses ipc if the hub's socket answers there.
    """
    own = _Place(this_host(), this_file_system())
    places = [msgspec.msgpack.decode(one, type=_Place) for one in agree(msgspec.msgpack.encode(own))]
    first = places[LEADER]
    elsewhere = next((place.host for place in places if place.files != first.files), None)
    address, problem = _HubAddress(), None
    if rank == LEADER:
        try:
            address = _start_shared(stack, run, folder, new, elsewhere)
        except Exception as error:  # noqa: BLE001 - raised after the exchange, for which the other ranks wait
            address, problem = _HubAddress(why=str(error)), error
    address = msgspec.msgpack.decode(agree(msgspec.msgpack.encode(address))[LEADER], type=_HubAddress)
    if problem:
        raise problem
    if address.ipc and (own.files == first.files or _answers_soon(address.ipc)):
        return Reach(address.ipc)
    if address.tcp is None:
        if own.files != first.files:
            text = "the hub runs on %s, and this rank cannot reach it: %s"
            patiently(partial(log.warning, text, first.host, address.why))
        return None
    return reach(address.tcp)


def _answers_soon(url: str) -> bool:
    """Whether the hub's ipc socket answers, although this process may see other files than rank 0. If the socket's
    directory exists here, wait up to `ANSWERS_S` seconds, because the hub may have just been started."""
    path = Path(url.removeprefix("ipc://"))
    until = time.monotonic() + ANSWERS_S
    while path.parent.is_dir() and not (answers := socket_answers(path)) and time.monotonic() < until:
        time.sleep(0.05)
    return path.parent.is_dir() and answers


def _start_shared(stack: ExitStack, run: str, folder: Path, new: bool, elsewhere: str | None) -> _HubAddress:
    """Start the hub. `elsewhere`: another machine that has ranks; None if all ranks are on this machine. If it is not
    None, the hub also listens on TCP, unless there is no key for ranks or this machine's address is unknown."""
    listen, why = None, ""
    if elsewhere is not None:
        try:
            listen = between_machines(os.environ.get("MASTER_ADDR") or elsewhere)
        except RunError as error:
            why = str(error)
    own, tcp = _start(stack, run, folder, None, listen, new)
    return _HubAddress(own.endpoint if own else None, tcp, why)


def _sockets_for(folder: Path) -> Path:
    digest = hashlib.blake2b(os.fsencode(folder.resolve()), digest_size=8).hexdigest()
    sockets = Path(tempfile.gettempdir()) / f"cockpit-{os.getuid()}-{digest}"
    check_socket_directory(sockets)  # another user may have guessed the name and created the directory first
    return sockets


def is_first_on_machine(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this is the first rank on its machine; True if the launcher set no local rank."""
    return next((environ[name] for name in LOCAL_RANK if name in environ), "0") == "0"
