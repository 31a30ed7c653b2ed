"""Forks the ranks of a run on this machine. (`torchrun.py` handles ranks that torchrun or Slurm started.)

The ranks start fast for two reasons: the hub starts in its own process while the parent imports torch, and each rank is
a fork of the parent, so torch is imported only once. The parent has no threads and executes no torch operations.
"""

import gc
import importlib
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents.rundir.failure_file import forget_failure
from agents.rundir.hub_supervisor import hub_of, say
from agents.transport.reach import Reach
from engine.launch.processes.forked_rank import ParentConnection, flush
from engine.launch.processes.forked_rank import run as run_forked
from engine.launch.processes.imports import without_collections
from engine.launch.processes.torchrun import REFUSED
from engine.launch.supervision.failure import Outcome, report_failure
from engine.launch.supervision.signals import Signals, StopNow
from engine.launch.supervision.supervisor import RankProcess, Supervisor, Timeouts
from engine.rendezvous import LOOPBACK, LastOperations, RankContext, Work, local_store


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
    timeouts: Timeouts | None = None,
    again: "Callable[[Ended], Start | int | None]" = lambda _: None,
) -> int:
    """Fork `world` ranks, run `work` in each, wait until all have ended, and return the exit status of the run.

    - 0: `work` has returned on all ranks, or the run was stopped with SIGTERM or SIGHUP.
    - 130: the run was stopped with Ctrl-C. A second Ctrl-C kills the ranks immediately.
    - 2: a rank refused to start; its reason is printed on stderr.
    - 1: a rank failed or could not be forked; the root cause is printed on stderr. If a rank failed,
      ``run_dir/failure.txt`` contains the reports of all ranks.

    When all ranks have ended, and no stop was requested, `again` decides whether the run goes on. If this callback
    returns a `Start`, new ranks are started as the `Start` describes, with the same hub. If `again` returns an exit
    status, the run ends with that status; if it returns None, the run ends with a status from the list above.

    In each rank, `sys.stdout` is replaced by a stream that ignores failed writes. Ranks must print through
    `sys.stdout`, so that the run continues if the reader of its output exits.

    `hub` is "auto" (start a hub and restart it if it dies; if `listen` is given, the hub also listens on that TCP
    address), "none", or the URL of a hub. `preload` names the modules to import before the fork. Call this from the
    main thread, with no other threads and before any CUDA call. Raises ValueError if `hub` or `listen` is invalid,
    OSError if `run_dir` cannot be created.
    """
    assert threading.active_count() == 1, "a fork copies only one thread"
    run_dir.mkdir(parents=True, exist_ok=True)
    forget_failure(run_dir)
    # torch reads these variables once, when it is imported. Without them, its warnings about a dead peer would hide the
    # engine's error message with the root cause, and its profiler would write two lines to stderr for each trace.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with Signals() as signals, hub_of(hub, run, run_dir, listen=listen) as (reached, hub_supervisor):
        try:
            with signals.raising(), without_collections():
                for module in preload:
                    importlib.import_module(module)
        except StopNow:
            return signals.exit_status
        start = Start(world, work, name_of_rank)
        while True:
            last_operations = LastOperations(start.world)
            try:
                ranks = fork_ranks(start.world, start.work, reached, run_dir, last_operations, signals)
            except StopNow:
                return signals.exit_status
            except OSError as error:
                say(f"cannot start {start.world} ranks: {error}\n")
                return 1
            supervisor = Supervisor(ranks, last_operations, signals, hub_supervisor, timeouts or Timeouts())
            root = supervisor.watch()
            if root:
                report_failure(root, supervisor.outcomes, start.name_of_rank, run_dir / "failure.txt")
            after = None if signals.stop else again(Ended(root, supervisor.outcomes))
            if isinstance(after, Start):
                forget_failure(run_dir)
                start = after
                continue
            if after is not None:
                return after
            if root:
                return REFUSED if root.report and root.report.refused else 1
            return signals.exit_status


@dataclass(frozen=True)
class Start:
    """The ranks to start: how many, the function that each one runs, and their names."""

    world: int
    work: Work
    name_of_rank: Callable[[int], str]


@dataclass(frozen=True)
class Ended:
    """How all ranks ended: the root cause of a failure, or None, and the outcome of each rank."""

    root: Outcome | None
    outcomes: Sequence[Outcome]


def fork_ranks(
    world: int,
    work: Work,
    hub: Reach | None,
    run_dir: Path,
    last_operations: LastOperations,
    signals: Signals,
) -> list[RankProcess]:
    """Fork all ranks. If a fork fails (OSError) or a stop signal arrives (StopNow), kill the ranks that have already
    been forked and raise the error."""
    parent = os.getpid()
    meeting = socket.create_server((LOOPBACK, 0), backlog=world + 8)
    port = meeting.getsockname()[1]
    ranks: list[RankProcess] = []
    gc.freeze()  # so that garbage collection in the ranks does not copy the memory pages of torch's objects
    flush()  # so that the ranks do not print the buffered output again
    with meeting, signals.blocked():
        try:
            for rank in range(world):
                if signals.pending():
                    raise StopNow
                ours, theirs = socket.socketpair()
                stacks = tempfile.TemporaryFile()  # noqa: SIM115 - both processes keep it open
                pid = os.fork()
                if pid == 0:
                    try:
                        for sibling in ranks:
                            sibling.channel.close()
                            sibling.stacks.close()
                        ours.close()
                        signals.close()
                        listening = meeting.detach() if rank == 0 else None
                        meeting.close()
                        open_store = local_store(rank, world, port, listening)
                        endpoint, key, _, _ = hub or (None, None, None, None)
                        context = RankContext(
                            rank,
                            world,
                            rank,
                            world,
                            endpoint,
                            run_dir,
                            open_store,
                            last_operations=last_operations,
                            slot=rank,
                            key=key,
                        )
                        run_forked(context, work, ParentConnection(parent, theirs, stacks))
                    finally:
                        # The child must never continue in the parent's code, not even after an exception.
                        os._exit(1)
                theirs.close()
                ours.setblocking(False)
                ranks.append(RankProcess(rank, pid, ours, stacks, Outcome(rank)))
        except (OSError, StopNow):
            for forked in ranks:
                forked.kill_and_close()
            raise
    return ranks
