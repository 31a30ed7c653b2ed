"""A rank that torchrun or Slurm has started: the same work as a forked rank, without a parent of the engine."""

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import msgspec

from agents.rundir.failure_file import forget_failure
from agents.rundir.hub_supervisor import (
    HubSupervisor,
    Reach,
    between_machines,
    hub_of,
    kept,
    listening,
    named_hub,
    reach,
    say,
)
from agents.rundir.runs import RunError
from agents.transport.addresses import Endpoints
from engine.config.refusal import RefusedError
from engine.launch.failure import report_of, sentence_of_report
from engine.launch.forked_rank import flush, listen_on_loopback, share_cores
from engine.launch.outlet import outlet
from engine.rendezvous import RankContext, Work, environment_store

HUB_KEY = "engine/hub"  # in the store: the hub's endpoints as JSON, or nothing
ENDED_KEY = "engine/ended"  # in the store: how many ranks have ended their work
PARENT_LOOK_S = 1.0
REFUSED = 2  # exit status
LEAVE_S = 30.0  # how long the store's host waits for the others

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def joined_place(run_dir: Path, environ: Mapping[str, str] = os.environ) -> RankContext | None:
    """The place that torchrun or Slurm gave this process; None when neither started it.

    Its `hub` is not known yet: `join` fills it in. Raises ValueError, one sentence, if the environment is
    there by half.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        numbers = _numbers(environ, _TORCHRUN, "started by torchrun, so it seems")
        rank, world, local_rank, local_world = numbers
    elif _in_slurm_step(environ):
        known = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "MASTER_ADDR", "MASTER_PORT")
        rank, world, local_rank = _numbers(environ, known, "started by Slurm")
        local_world = _tasks_on_this_node(environ, world)
    else:
        return None
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        raise ValueError(
            f"the environment gives rank {rank} of {world}, on its machine {local_rank} of {local_world}: "
            "that cannot be"
        )
    return RankContext(rank, world, local_rank, local_world, None, run_dir, environment_store(rank, world))


def _numbers(environ: Mapping[str, str], names: tuple[str, ...], who: str) -> list[int]:
    """The values of all `names` but MASTER_ADDR and MASTER_PORT, which need only be there and be legal."""
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ValueError(f"{who}, but {' and '.join(missing)} must be set too, the same way for every rank")
    numbers = {}
    for name in names:
        if name != "MASTER_ADDR":
            if not environ[name].isdecimal():
                raise ValueError(f"{who}, but {name} = {environ[name]!r} is not a whole number")
            numbers[name] = int(environ[name])
    if not 0 < numbers.pop("MASTER_PORT") < 65536:
        raise ValueError(f"{who}, but MASTER_PORT = {environ['MASTER_PORT']} is no port; legal: 1 to 65535")
    return list(numbers.values())


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process beside others.

    A batch script has a rank too, but is in a job and in no step; and a step of one task is someone's shell.
    """
    if "SLURM_JOB_ID" in environ and "SLURM_STEP_ID" not in environ:
        return False
    return "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1"


def _tasks_on_this_node(environ: Mapping[str, str], world: int) -> int:
    """From Slurm's list of tasks a node, e.g. ``4(x2),3``; all tasks are here if it names no nodes."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(world)
    counts: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(tasks)] * int(times or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    if node >= len(counts):
        raise ValueError(f"started by Slurm, but node {node} is not in its tasks per node, {listed!r}")
    return counts[node]


def join(
    place: RankContext,
    work: Work,
    *,
    name_of_rank: Callable[[int], str],
    hub: str,
    run: str,
    listen: str | None = None,
    on_failure: Callable[[], None] | None = None,
) -> int:
    """Do `work` in this process as the rank that `place` says, and give its exit status, 0.

    SIGTERM and SIGINT ask for the stop. When the work fails, one sentence goes to stderr, with the traceback,
    and the process ends here with status 1, after `on_failure`: to unwind the interpreter around a broken
    group could hang.
    A rank that refuses what was asked for, or has no key to the hub of another machine, ends with status 2, and one
    sentence.
    Raises ValueError for a `hub` or `listen` that cannot be, OSError for a `run_dir` that cannot.
    """
    if place.rank == 0:  # the folder of the others may be named a second later
        place.run_dir.mkdir(parents=True, exist_ok=True)
        forget_failure(place.run_dir)
    named_hub(hub, place.run_dir, listen)  # refused before anything is begun
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, place.stop)
    threading.Thread(target=_end_with, args=(os.getppid(),), name="parent-watch", daemon=True).start()
    faulthandler.enable()
    sys.stdout = outlet()
    if place.local_world == place.world:
        listen_on_loopback()
    failed, status = False, 1
    try:
        with _hub(place, hub, run, listen) as place:
            share_cores(place.local_world)
            work(place)
            sys.stdout.flush()
            _leave_together(place)
    except (RunError, RefusedError) as error:
        failed, status = True, REFUSED
        say(f"rank {place.rank}: {error}\n")
    except BaseException as error:  # noqa: BLE001 - whatever ended the work, SystemExit too, is reported
        failed = True
        _tell(place, error, name_of_rank)
    try:
        if failed and on_failure:
            on_failure()
        flush()
    finally:
        if failed:
            os._exit(status)
    return 0


def _end_with(parent: int) -> None:
    """torchrun ends its ranks when it ends; when it is killed, nobody does."""
    while os.getppid() == parent:
        time.sleep(PARENT_LOOK_S)
    os._exit(1)


def _tell(place: RankContext, error: BaseException, name_of_rank: Callable[[int], str]) -> None:
    report = report_of(place.rank, place.last_operation(), error)
    text = sentence_of_report(report, name_of_rank(place.rank)) + "\n"
    # Of a rank that only lost its peer, the sentence is enough: the peer's own traceback matters.
    say(text if report.of_a_peer else text + report.traceback)
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)  # torchrun's own summary then names the error


def _leave_together(place: RankContext) -> None:
    """Where rank 0 serves the store (not torchrun's agent), it waits until nobody needs it any more."""
    if place.world == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    store = place.store()
    if store.add(ENDED_KEY, 1) == place.world:
        store.set(f"{ENDED_KEY}/all", "")
    if place.rank == 0:
        try:
            store.wait([f"{ENDED_KEY}/all"], timedelta(seconds=LEAVE_S))
        except RuntimeError:
            say(f"rank 0 has waited {LEAVE_S:g} s for the other ranks to end, and leaves\n")


@contextmanager
def _hub(place: RankContext, hub: str, run: str, listen: str | None) -> Iterator[RankContext]:
    """The place with its hub: rank 0 starts one, and tells the others where it is."""
    if hub == "auto" and place.rank != 0:
        told = place.store().get(HUB_KEY)
        yield _with(place, reach(msgspec.json.decode(told, type=Endpoints)) if told else None)
        return
    spread = hub == "auto" and place.local_world != place.world
    if spread:
        try:
            listen = between_machines(os.environ["MASTER_ADDR"], listen)
        except RunError as error:
            say(f"the ranks are on several machines, and go without a hub: {error}\n")
            hub = "none"
    with hub_of(hub, run, place.run_dir, listen=listen) as (mine, keeper):
        if place.world > 1 and place.rank == 0 and (hub == "auto" or spread):
            place.store().set(HUB_KEY, _word(mine, keeper, place.run_dir, spread).decode())
        with kept(keeper):
            yield _with(place, mine)


def _word(mine: Reach | None, keeper: HubSupervisor | None, run_dir: Path, spread: bool) -> bytes:
    """For the store: the hub's endpoints, or nothing. No key travels there, for it asks nobody who they are."""
    if mine is None or keeper is None:
        return b""
    if not spread:
        return msgspec.json.encode(Endpoints(mine.endpoint, ""))
    try:
        return msgspec.json.encode(listening(keeper, run_dir))
    except RunError as error:
        say(f"the ranks of other machines go without a hub: {error}\n")
        return b""


def _with(place: RankContext, hub: Reach | None) -> RankContext:
    return replace(place, hub=hub.endpoint, key=hub.key) if hub else replace(place, hub=None)
