"""Runs a rank that torchrun or Slurm has started. Unlike a rank that the engine forks, this rank has no engine process
as its parent."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec

from agents.rundir.failure_file import forget_failure
from agents.rundir.hub_supervisor import (
    HubSupervisor,
    between_machines,
    hub_of,
    kept,
    listening,
    named_hub,
    reach,
    say,
)
from agents.rundir.node_relay import through_relay
from agents.rundir.runs import RunError
from agents.transport.addresses import Endpoints
from agents.transport.reach import Reach
from engine.config.refusal import RefusedError
from engine.launch.processes import slurm
from engine.launch.processes.forked_rank import flush, listen_on_loopback, share_cores
from engine.launch.processes.standard_output import standard_stream
from engine.launch.supervision.failure import report_of, sentence_of_report
from engine.launch.supervision.signals import SAVE_SIGNAL
from engine.rendezvous import RankContext, Work, environment_store

HUB_KEY = "engine/hub"  # in the store: the hub's endpoints as JSON; empty without a hub
ENDED_KEY = "engine/ended"  # in the store: the number of ranks that have completed their work
PARENT_POLL_S = 1.0
REFUSED = 2  # exit status of a rank that refuses to start
END_WAIT_S = 30.0  # if rank 0 serves the store: how long it waits for the other ranks to end

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def context_from_environment(
    run_dir: Path, environ: MutableMapping[str, str] = os.environ
) -> RankContext | None:
    """The rank context from the environment variables of torchrun or Slurm; None if neither started this process.

    Under Slurm, sets MASTER_ADDR and MASTER_PORT in `environ` if they are not set. The context's `hub` is None until
    `join` sets it. Raises ValueError if a variable is missing or invalid.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        numbers = _numbers(environ, _TORCHRUN, "RANK and WORLD_SIZE are set, as by torchrun")
        rank, world, local_rank, local_world = numbers
    elif slurm.in_step(environ):
        environ.update(slurm.meeting(environ))
        known = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR", "MASTER_PORT")
        rank, world, local_rank = _numbers(environ, known, "started by Slurm")
        local_world = slurm.tasks_on_this_node(environ, world)
    elif alone := [name for name in ("RANK", "WORLD_SIZE") if name in environ]:
        raise ValueError(
            f"{alone[0]} = {environ[alone[0]]!r} is set without the other one of RANK and WORLD_SIZE; legal: both, as "
            "torchrun sets them, or neither"
        )
    else:
        return None
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise ValueError(
            f"the environment has rank {rank} of {world} ranks, on this machine rank {local_rank} of {local_world}; "
            "legal: ranks below the number of ranks, and no more ranks on this machine than in the whole run"
        )
    return RankContext(rank, world, local_rank, local_world, None, run_dir, environment_store(rank, world))


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], who: str) -> list[int]:
    """The values of the environment variables `names` as integers. MASTER_ADDR and MASTER_PORT are checked but not
    returned. If a variable is missing or invalid, raises a ValueError whose message begins with `who`."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ValueError(f"{who}, but {' and '.join(missing)} must be set too, on every rank")
    numbers = {}
    for name in names:
        if name != "MASTER_ADDR":
            if not environ[name].isdecimal():
                raise ValueError(f"{who}, but {name} = {environ[name]!r} is not a whole number")
            numbers[name] = int(environ[name])
    if not 0 < numbers.pop("MASTER_PORT") < 65536:
        raise ValueError(
            f"{who}, but MASTER_PORT = {environ['MASTER_PORT']} is not a port; legal: 1 to 65535"
        )
    return list(numbers.values())


def join(
    context: RankContext,
    work: Work,
    *,
    name_of_rank: Callable[[int], str],
    hub: str,
    run: str,
    listen: str | None = None,
    on_failure: Callable[[], None] = lambda: None,
) -> int:
    """Run `work` in this process as the rank that `context` describes, and return the exit status 0.

    SIGTERM and SIGINT request a stop; SIGUSR1 to rank 0 requests a checkpoint. If `work` fails, this function prints
    the error and its traceback on stderr, calls `on_failure` and exits the process at once with status 1, because a
    normal interpreter exit with a broken process group could hang. If the rank refuses to start, or
    has no key for a hub on another machine, this function prints the reason and exits with status 2. Raises ValueError
    if `hub` or `listen` is invalid, OSError if rank 0 cannot create `run_dir`.
    """
    if context.rank == 0:  # the other ranks get the name of the folder from rank 0
        context.run_dir.mkdir(parents=True, exist_ok=True)
        forget_failure(context.run_dir)
    named_hub(hub, context.run_dir, listen)  # refuse invalid values before anything starts
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, context.stop)
    signal.signal(SAVE_SIGNAL, context.save)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    faulthandler.enable()
    sys.stdout = standard_stream()
    if context.local_world == context.world:
        listen_on_loopback()
    failed, status = False, 1
    try:
        with _hub(context, hub, run, listen) as reached, through_relay(reached, run) as reached:
            context = _with(context, reached)
            share_cores(context.local_world)
            work(context)
            sys.stdout.flush()
            _wait_for_other_ranks(context)
    except (RunError, RefusedError) as error:
        failed, status = True, REFUSED
        say(f"rank {context.rank}: {error}\n")
    except BaseException as error:  # noqa: BLE001 - report every exception, also SystemExit
        failed = True
        _report(context, error, name_of_rank)
    try:
        flush()
        if failed:
            on_failure()
    finally:
        if failed:
            os._exit(status)
    return 0


def _end_with(parent: int) -> None:
    """Exit when the process `parent` dies. (torchrun ends its ranks when it exits, but not when it is killed.)"""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def _report(context: RankContext, error: BaseException, name_of_rank: Callable[[int], str]) -> None:
    report = report_of(context.rank, context.last_operation(), error)
    text = sentence_of_report(report, name_of_rank(context.rank)) + "\n"
    # A rank that failed because of a peer prints no traceback: the peer's traceback shows the cause.
    say(text if report.caused_by_peer else text + report.traceback)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun's summary then shows the error


def _wait_for_other_ranks(context: RankContext) -> None:
    """If rank 0 serves the store, make rank 0 wait until all ranks have ended. Under torchrun, torchrun's agent serves
    the store, so no rank waits."""
    if context.world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    store = context.store()
    if store.add(ENDED_KEY, 1) == context.world:
        store.set(f"{ENDED_KEY}/all", "")
    if context.rank == 0:
        try:
            store.wait([f"{ENDED_KEY}/all"], timedelta(seconds=END_WAIT_S))
        except RuntimeError:
            say(f"the other ranks have not ended within {END_WAIT_S:g} s; rank 0 exits\n")


@contextmanager
def _hub(context: RankContext, hub: str, run: str, listen: str | None) -> Iterator[Reach | None]:
    """Yield what this rank needs to connect to the hub, or None if there is no hub. With "auto", rank 0 starts the hub
    and shares its endpoints through the store.
    """
    if hub == "auto" and context.rank != 0:
        endpoints = context.store().get(HUB_KEY)
        yield reach(msgspec.json.decode(endpoints, type=Endpoints)) if endpoints else None
        return
    several_machines = hub == "auto" and context.local_world != context.world
    if several_machines:
        try:
            listen = between_machines(os.environ["MASTER_ADDR"], listen)
        except RunError as error:
            say(f"the ranks are on several machines, and the run has no hub: {error}\n")
            hub = "none"
    with hub_of(hub, run, context.run_dir, listen=listen) as (mine, supervisor):
        if context.world > 1 and context.rank == 0 and (hub == "auto" or several_machines):
            context.store().set(
                HUB_KEY, _encoded_endpoints(mine, supervisor, context.run_dir, several_machines).decode()
            )
        with kept(supervisor):
            yield mine


def _encoded_endpoints(
    mine: Reach | None, supervisor: HubSupervisor | None, run_dir: Path, several_machines: bool
) -> bytes:
    """The hub's endpoints as JSON for the store; empty without a hub. The endpoints may contain the hub's public key,
    but no secret key, because the store has no authentication and anyone who reaches it can read them."""
    if mine is None or supervisor is None:
        return b""
    if not several_machines:
        return msgspec.json.encode(Endpoints(mine.endpoint, ""))
    try:
        return msgspec.json.encode(listening(supervisor, run_dir))
    except RunError as error:
        say(f"the ranks of other machines have no hub: {error}\n")
        return b""


def _with(context: RankContext, hub: Reach | None) -> RankContext:
    endpoint, key, _, fallback = hub or (None, None, None, None)
    return replace(context, hub=endpoint, key=key, fallback=fallback)
