"""Starts the ranks of a run: forked on this machine, or (`engine.launch.torchrun`) started by torchrun or Slurm.

The order of a local launch is its speed: the hub starts first and by itself, torch is imported once, then
every rank is a fork of the parent that has it. The parent has no threads and runs no torch code.
"""

import gc
import importlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.rundir.failure_file import forget_failure
from agents.rundir.hub_supervisor import Reach, hub_of, say
from engine.launch.failure import Outcome, tell
from engine.launch.forked_rank import Tie, flush
from engine.launch.forked_rank import run as run_forked
from engine.launch.signals import Signals, StopNow
from engine.launch.supervisor import Patience, RankProcess, Supervisor
from engine.launch.torchrun import REFUSED, join, joined_place
from engine.rendezvous import LOOPBACK, LastOperations, RankContext, StopFlag, Work, local_store

__all__ = ["Patience", "RankContext", "Work", "join", "joined_place", "launch"]


def launch(
    world: int,
    work: Work,
    *,
    name_of_rank: Callable[[int], str],
    hub: str,
    run: str,
    run_dir: Path,
    listen: str | None = None,
    preload: Sequence[str] = ("torch", "torch.distributed"),
    patience: Patience | None = None,
) -> int:
    """Fork `world` ranks that each do `work`, watch them to their end, and give the exit status of the run.

    0: all work returned, or SIGTERM or SIGHUP asked for the stop. 130: Ctrl-C asked. 2: a rank refused what was asked
    for, in the one sentence that stderr gets. 1: a rank failed; then
    stderr has one sentence on the first cause, and ``run_dir/failure.txt`` every rank's report. A second
    Ctrl-C kills at once. A rank must write to `sys.stdout`; if its reader leaves, the run goes on.

    `hub` is "auto" (start one and keep it alive, at `listen` over TCP too), "none", or the URL of one. `preload` names
    the modules to import before the fork. Call it from the main thread, with no other thread and before any CUDA call.
    Raises ValueError for a `hub` that cannot be, OSError for a `run_dir` that cannot.
    """
    assert threading.active_count() == 1, "a fork copies one thread only"
    run_dir.mkdir(parents=True, exist_ok=True)
    forget_failure(run_dir)
    # Read once, when torch is loaded. Its warnings about a peer that is gone would bury our one sentence, and its
    # profiler writes two lines to stderr for each trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with Signals() as signals, hub_of(hub, run, run_dir, listen=listen) as (reached, keeper):
        try:
            with signals.eager():
                for module in preload:
                    importlib.import_module(module)
        except StopNow:
            return signals.exit_status
        last_operations = LastOperations(world)
        try:
            ranks = fork_ranks(world, work, reached, run_dir, last_operations, signals)
        except StopNow:
            return signals.exit_status
        except OSError as error:
            say(f"{world} ranks could not be started: {error}\n")
            return 1
        supervisor = Supervisor(ranks, last_operations, signals, keeper, patience or Patience())
        root = supervisor.watch()
        if root:
            tell(root, supervisor.outcomes, name_of_rank, run_dir / "failure.txt")
            return REFUSED if root.report and root.report.refused else 1
        return signals.exit_status


def fork_ranks(
    world: int,
    work: Work,
    hub: Reach | None,
    run_dir: Path,
    last_operations: LastOperations,
    signals: Signals,
) -> list[RankProcess]:
    """All ranks, or none and an OSError, or StopNow where a stop signal came meanwhile."""
    parent = os.getpid()
    meeting = socket.create_server((LOOPBACK, 0), backlog=world + 8)
    port = meeting.getsockname()[1]
    ranks: list[RankProcess] = []
    gc.freeze()  # ranks that collect garbage would otherwise copy every page of torch's objects
    flush()  # or every rank would print it once more
    with meeting, signals.held():
        try:
            for rank in range(world):
                if signals.waiting():
                    raise StopNow
                ours, theirs = socket.socketpair()
                stacks = tempfile.TemporaryFile()  # noqa: SIM115 - both processes keep it
                pid = os.fork()
                if pid == 0:
                    try:
                        for sibling in ranks:
                            sibling.line.close()
                            sibling.stacks.close()
                        ours.close()
                        signals.close()
                        listening = meeting.detach() if rank == 0 else None
                        meeting.close()
                        open_store = local_store(rank, world, port, listening)
                        endpoint, key = hub or (None, None)
                        place = RankContext(
                            rank,
                            world,
                            rank,
                            world,
                            endpoint,
                            run_dir,
                            open_store,
                            StopFlag(),
                            last_operations,
                            rank,
                            key,
                        )
                        run_forked(place, work, Tie(parent, theirs, stacks))
                    finally:
                        os._exit(1)  # whatever happened: never on into the parent's code
                theirs.close()
                ours.setblocking(False)
                ranks.append(RankProcess(rank, pid, ours, stacks, Outcome(rank)))
        except (OSError, StopNow):
            for forked in ranks:
                forked.abandon()
            raise
    return ranks
