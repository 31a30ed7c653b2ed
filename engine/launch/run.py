"""Runs a layout: prepares the run's folder and the corpus, then forks the ranks; under torchrun or Slurm, runs one rank
in this process."""

import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.protocol import Step, Summary
from agents.rundir.hub_supervisor import named_hub, say
from agents.rundir.runs import RunError
from engine.checkpoint.folder_lock import lock_folder
from engine.checkpoint.manifest import checkpoints_folder
from engine.checkpoint.reading import changed_files, damage
from engine.checkpoint.resume_point import Start as Resumed
from engine.checkpoint.resume_point import find_start, is_restart, start_time
from engine.collectives.measured import chosen_all_reduces
from engine.config.checks.layout_checks import advice
from engine.config.checks.trainable import untrained
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import write_layout
from engine.data.mixture import Text
from engine.data.prompt import sample_prompt
from engine.launch.processes.imports import without_collections
from engine.launch.processes.local_ranks import launch
from engine.launch.processes.preparation import Preparation
from engine.launch.processes.torchrun import context_from_environment, join
from engine.launch.restarts.decision import Attempt, Restarts
from engine.launch.restarts.restart import Restart, Restarted
from engine.launch.run_folder import make_folder
from engine.launch.supervision.signals import SAVE_SIGNAL
from engine.preflight.compiler import compiler_refusal
from engine.preflight.memory import device_refusal, memory_refusal
from engine.rendezvous import RankContext, Work
from engine.train.batches.corpus import read_text, validation_text

if TYPE_CHECKING:
    from engine.checkpoint.save import Saved
    from engine.train.text_samples import TextSample

# Modules to import once, before the fork. They are strings, so that importing this module does not import torch.
PRELOAD = ("torch", "torch.distributed", "engine.launch.rank_main")


def check_own_model(layout: Layout) -> None:
    """Load and check the user's own model (`engine.model.dry_run`). Raises LayoutError."""
    if layout.model.own:
        from engine.model import dry_run  # imports torch

        dry_run.check_own_model(layout)


def nothing(_: object) -> None:
    """A callback that does nothing."""


def run_layout(
    layout: Layout,
    *,
    hub: str = "auto",
    listen: str | None = None,
    run_dir: Path | None = None,
    resume: bool | Path = False,
    restarted: bool = False,
    fixed: Collection[str] = (),
    device: str = "auto",
    lost_output: Callable[[], str | None] = lambda: None,
    before_exit: Callable[[], None] = lambda: None,
    on_folder: Callable[[Path], None] = nothing,
    on_start: Callable[[str, int | None], None] = lambda _, __: None,
    on_step: Callable[[Step], None] = nothing,
    on_summary: Callable[[Summary], None] = nothing,
    on_checkpoint: Callable[["Saved"], None] = nothing,
    on_sample: Callable[["TextSample"], None] = nothing,
    on_restart: Callable[[Layout, Restart], None] = lambda _, __: None,
    on_restarted: Callable[[Restarted], None] = nothing,
    on_end: Callable[[int], None] = nothing,
) -> int:
    """Train the model that `layout` describes and return the exit status: 0 if training is done or SIGTERM or SIGHUP
    stopped it, 1 if a rank failed or the last checkpoint was not saved, 2 if a rank refused to start, 130 after Ctrl-C.

    Forks the ranks from this process. If torchrun or Slurm started this process, the process runs as one rank instead.

    - `hub`: "auto" (start a hub), "none", or the URL of a hub.
    - `listen`: TCP address on which the new hub also listens for clients with a key, ``tcp://ADDRESS:PORT`` or "auto".
    - `run_dir`: the run's folder; by default a new one under `layout.run.dir`.
    - `resume`: if False, start at step 0. If `resume` is True, continue the run in `run_dir` or, if `run_dir` is None,
      the newest run with the name of this run. If `resume` is a path, start from the run or checkpoint at that path
      (docs/train/checkpoints.md).
    - `restarted`: continue the run in `run_dir` if it has a checkpoint, as after a restart by torchrun or Slurm.
    - `fixed`: keys such as "knobs.recompute" whose values in `layout` take precedence over those of the checkpoint.
    - `device`: "cpu", "cuda", or "auto": a GPU for each rank if the machine has enough GPUs, else the CPU.
    - `lost_output`: called after each step; the sentence that it returns becomes a warning in the run's log.
    - `before_exit`: called under torchrun or Slurm before a failed rank exits without leaving this function.

    Callbacks: `on_step` is called on every rank after each of its steps, with the rank's own record. Rank 0 calls
    `on_start` with the run's name and the step it resumes from (or None), `on_summary` with each step's summary over
    all ranks (one step late), `on_checkpoint` with the result of each save, and `on_sample` with each sample of text
    that the model generates ([sample]). The parent process (under torchrun or Slurm: rank 0) calls `on_folder` with the
    run's folder before the first step and `on_end` with the exit status. Before the parent restarts the ranks, it calls
    `on_restart` with the layout of the restarted ranks; after the first step that follows a restart, rank 0 calls
    `on_restarted`. Under torchrun or Slurm, this function never restarts ranks.

    Call this from the main thread, before any CUDA call or other torch work, because this function forks. Raises
    LayoutError or `agents.rundir.runs.RunError` if the run cannot start.
    """
    # Until the ranks can save, ignore the request; by default it would end the process.
    signal.signal(SAVE_SIGNAL, signal.SIG_IGN)
    if refusal := untrained(layout):
        raise LayoutError(refusal)
    if layout.train.compile and device != "cuda" and (refusal := compiler_refusal()):
        raise LayoutError(refusal)
    check_own_model(layout)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(start_time(os.environ, os.getppid())))
    named = Path(layout.run.dir) / f"{layout.run.name}-{stamp}"
    try:
        context = context_from_environment(named)
    except ValueError as error:
        raise RunError(str(error)) from None
    leads = context is None or context.rank == 0
    grid = layout.ranks
    if context and context.world != grid.world:
        raise LayoutError(
            f"the layout has {grid.world} ranks, but {context.world} were started; legal: equal numbers"
        )
    if layout.run.collectives and leads:
        # Rank 0 refuses a wrong file; the other ranks use rank 0's file.
        chosen_all_reduces(layout.run.collectives)
    with ExitStack() as locks:
        # Reading data and checkpoints may take any time; ranks of torchrun or Slurm wait for each other meanwhile.
        with Preparation(context) if context else nullcontext() as preparation:
            corpus, validation_corpus = read_text(layout), validation_text(layout)
            digests = [text.digest for text in (corpus, validation_corpus) if text]
            sample_prompt(layout)  # refuse a mistake in [sample] before a folder is created
            changed = preparation.changed_files if preparation else changed_files
            find = partial(
                find_start,
                layout,
                resume,
                named=named,
                restarted=restarted or is_restart(os.environ),
                fixed=fixed,
                data=digests[0],
                # The content of a checkpoint is read once; under torchrun or Slurm, each rank reads a share of it.
                damage=cache(partial(damage, changed_files=changed)) if leads else nothing,
            )
            # Print the warnings only after the folders are locked: until then, another run may save and remove
            # checkpoints there.
            warnings: list[str] = []
            try:
                start = find(run_dir, warn=warnings.append)
            except LayoutError:
                say("".join(f"{line}\n" for line in warnings))
                raise
            named_hub(hub, start.run_dir or named, listen)  # refuse invalid values before a folder is created
            if context:
                context = replace(context, run_dir=start.run_dir or named)
            if context is None and (refusal := memory_refusal(layout) or device_refusal(grid.world, device)):
                raise LayoutError(refusal)
            folder = context.run_dir if context else start.run_dir or named
            if leads:
                if layout.checkpoint.dir:
                    make_folder(Path(layout.checkpoint.dir), named, "the folder of checkpoints")
                folder = make_folder(context.run_dir if context else start.run_dir, named)
            checkpoints_dir = checkpoints_folder(layout, folder)
            for own_dir in (folder, checkpoints_dir) if leads else ():
                locks.enter_context(lock_folder(own_dir, warn=lambda why: say(f"{why}\n")))
            if leads and start.run_dir:
                # Search again: another run may have saved a checkpoint while this run waited for the lock.
                warnings.clear()
                start = find(start.run_dir, warn=warnings.append)
            if leads:
                on_folder(folder)
                say("".join(f"{line}\n" for line in (*warnings, *advice(layout))))
                write_layout(layout, folder)
            if preparation:
                preparation.meet()

        def work_of(attempt: Attempt, supervised: bool = True) -> Work:
            return partial(
                _work,
                attempt=attempt,
                supervised=supervised,
                corpus=corpus,
                validation_corpus=validation_corpus,
                checkpoints_dir=checkpoints_dir,
                device=device,
                callbacks=Callbacks(
                    on_start, on_step, on_summary, on_checkpoint, on_sample, on_restarted, lost_output
                ),
            )

        def continue_from(new: Layout, moved: list[str]) -> Resumed:
            check_own_model(new)
            if refusal := memory_refusal(new) or device_refusal(new.ranks.world, device):
                raise LayoutError(refusal)
            return find_start(
                new,
                resume,
                folder,
                named,
                restarted=True,
                fixed=[*fixed, *moved],
                warn=lambda why: say(f"{why}\n"),
                data=digests[0],
            )

        def begin_again(attempt: Attempt) -> None:
            write_layout(attempt.layout, folder)
            on_restart(attempt.layout, attempt.restart)

        def failed() -> None:
            if leads:
                on_end(1)
            before_exit()

        restarts = Restarts(layout, start, continue_from, work_of, begin_again)
        if context is None:
            status = launch(
                grid.world,
                work_of(restarts.attempt),
                name_of_rank=grid.name,
                hub=hub,
                listen=listen,
                run=layout.run.name,
                run_dir=folder,
                preload=PRELOAD,
                again=restarts.after,
            )
        else:
            status = join(
                context,
                work_of(restarts.attempt, supervised=False),
                name_of_rank=grid.name,
                hub=hub,
                listen=listen,
                run=layout.run.name,
                on_failure=failed,
            )
    if status == 0 and restarts.attempt.restart.handover.unsaved:
        say("the exit status is 1, because the last checkpoint was not saved\n")
        status = 1
    if leads:
        on_end(status)
    return status


@dataclass(frozen=True)
class Callbacks:
    """The callbacks passed to `run_layout` that the rank processes call."""

    on_start: Callable[[str, int | None], None]
    on_step: Callable[[Step], None]
    on_summary: Callable[[Summary], None]
    on_checkpoint: Callable[["Saved"], None]
    on_sample: Callable[["TextSample"], None]
    on_restarted: Callable[[Restarted], None]
    lost_output: Callable[[], str | None]


def _work(
    context: RankContext,
    *,
    attempt: Attempt,
    supervised: bool,
    corpus: Text,
    validation_corpus: Text | None,
    checkpoints_dir: Path,
    device: str,
    callbacks: Callbacks,
) -> None:
    """The work of one rank: train, and inform the launcher if the run continues with another layout."""
    with without_collections():  # under torchrun and Slurm, this imports torch
        from engine.launch.rank_main import train

    checkpoint = attempt.resumed.checkpoint
    if context.rank == 0:
        callbacks.on_start(context.run_dir.name, checkpoint.manifest.step if checkpoint else None)
    finished = train(
        context,
        attempt.resumed.layout,
        corpus,
        validation_corpus,
        callbacks.on_step,
        callbacks.on_summary,
        callbacks.on_checkpoint,
        callbacks.on_sample,
        checkpoints_dir,
        checkpoint.folder if checkpoint else None,
        attempt.layout,
        device,
        attempt.restart if supervised else None,
        callbacks.on_restarted,
        # Forked ranks share their output with rank 0; a rank of torchrun or Slurm has an output of its own.
        callbacks.lost_output if context.rank == 0 or not supervised else lambda: None,
    )
    handover = attempt.restart.handover
    if context.rank == 0 and finished.unsaved:
        handover.lose()
    if context.rank == 0 and finished.leaving is not None:
        handover.leave(finished.leaving)
