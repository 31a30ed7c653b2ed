"""Runs a layout as a whole: prepares the folder, the corpus and the hub, and forks the ranks or joins them."""

import os
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from agents.protocol import Step, Summary
from agents.rundir.hub_supervisor import named_hub, say
from agents.rundir.runs import RunError
from engine.checkpoint.folder_lock import lock_folder
from engine.checkpoint.manifest import checkpoints_folder
from engine.checkpoint.reading import damage
from engine.checkpoint.resume import find_start, is_restart, start_time
from engine.config.checks import advice
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import write_layout
from engine.config.trainable import untrained
from engine.launch.ranks import join, joined_place, launch
from engine.launch.run_folder import make_folder
from engine.preflight.compiler import compiler_refusal
from engine.preflight.memory import device_refusal, memory_refusal
from engine.rendezvous import RankContext
from engine.train.corpus import read_corpus

if TYPE_CHECKING:
    from engine.checkpoint.save import Saved

# Modules that every rank needs, imported once before the fork. They are named, so that this module needs no torch.
PRELOAD = ("torch", "torch.distributed", "engine.launch.rank_main")


def nothing(_: object) -> None:
    """A callback that does nothing."""


def run_layout(
    layout: Layout,
    *,
    hub: str = "auto",
    listen: str | None = None,
    run_dir: Path | None = None,
    resume: bool | Path = False,
    fixed: Collection[str] = (),
    device: str = "auto",
    on_folder: Callable[[Path], None] = nothing,
    on_start: Callable[[str, int | None], None] = lambda _, __: None,
    on_step: Callable[[Step], None] = nothing,
    on_summary: Callable[[Summary], None] = nothing,
    on_checkpoint: Callable[["Saved"], None] = nothing,
    on_end: Callable[[int], None] = nothing,
) -> int:
    """Train `layout` and return the exit status: 0 done, 1 a rank failed, 2 a rank refused it, 130 Ctrl-C.

    The ranks are forked from this process; if torchrun or Slurm started it, it is a rank itself. `hub` is "auto"
    (start one, so that a cockpit can attach; with `listen`, ``tcp://ADDRESS:PORT`` or "auto", over TCP too, for
    whoever has a key), "none", or a URL; `run_dir` is the run's folder, a new one under
    `layout.run.dir` if left out. `resume` continues from a checkpoint: True means one of this run, a path the
    run or checkpoint at that path (docs/checkpoints.md). `fixed` then lists keys such as "knobs.recompute" whose values
    take precedence over those of the checkpoint.

    `device` is "cpu", "cuda", or "auto": a GPU for each rank if the machine has enough GPUs, else the CPU.

    `on_step` is called in every rank after each of its steps, with that rank's own record. The others are called for
    the run as a whole: in rank 0 `on_start` with the run's name and the step it was resumed from, `on_summary` with
    each step of the whole job, one step late, and `on_checkpoint` when one was saved or failed; in the process that
    outlives the ranks or, joined, in rank 0, `on_folder` with the run's folder before the first step, and `on_end` with
    the exit status.

    Call it from the main thread, before any CUDA call or other torch work, because it forks the ranks. Raises
    LayoutError or `agents.rundir.runs.RunError`, with one sentence, if the run is impossible.
    """
    if refusal := untrained(layout):
        raise LayoutError(refusal)
    if layout.train.compile and device != "cuda" and (refusal := compiler_refusal()):
        raise LayoutError(refusal)
    corpus = read_corpus(layout)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(start_time(os.environ, os.getppid())))
    named = Path(layout.run.dir) / f"{layout.run.name}-{stamp}"
    try:
        place = joined_place(named)
    except ValueError as error:
        raise RunError(str(error)) from None
    leads = place is None or place.rank == 0
    find = partial(
        find_start,
        layout,
        resume,
        named=named,
        restarted=is_restart(os.environ),
        fixed=fixed,
        data=corpus.digest,
        damage=cache(damage) if leads else nothing,  # only rank 0 reads the content, and only once
    )
    # Printed once the folders are locked: until then another run may save and prune there.
    warnings: list[str] = []
    try:
        start = find(run_dir, warn=warnings.append)
    except LayoutError:
        say("".join(f"{line}\n" for line in warnings))
        raise
    named_hub(hub, start.run_dir or named, listen)  # refused before a folder is made
    if place:
        place = replace(place, run_dir=start.run_dir or named)
    grid = layout.ranks
    if place and place.world != grid.world:
        raise LayoutError(f"the layout has {grid.world} ranks, but {place.world} were started; legal: equal")
    if place is None and (refusal := memory_refusal(layout) or device_refusal(grid.world, device)):
        raise LayoutError(refusal)
    folder = place.run_dir if place else start.run_dir or named
    if leads:
        if layout.checkpoint.dir:
            make_folder(Path(layout.checkpoint.dir), named, "the folder of checkpoints")
        folder = make_folder(place.run_dir if place else start.run_dir, named)
    checkpoints_dir = checkpoints_folder(layout, folder)
    with ExitStack() as locks:
        for own_dir in (folder, checkpoints_dir) if leads else ():
            locks.enter_context(lock_folder(own_dir, warn=lambda why: say(f"{why}\n")))
        if leads and start.run_dir:
            # Search again: another run may have saved a checkpoint while this one waited for the lock.
            warnings.clear()
            start = find(start.run_dir, warn=warnings.append)
        if leads:
            on_folder(folder)
            say("".join(f"{line}\n" for line in (*warnings, *advice(layout))))
            write_layout(layout, folder)
        checkpoint = start.checkpoint

        def work(place: RankContext) -> None:
            from engine.launch.rank_main import train

            if place.rank == 0:
                on_start(place.run_dir.name, checkpoint.manifest.step if checkpoint else None)
            resumed = checkpoint.folder if checkpoint else None
            train(
                place,
                start.layout,
                corpus,
                on_step,
                on_summary,
                on_checkpoint,
                checkpoints_dir,
                resumed,
                layout,
                device,
            )

        if place is None:
            status = launch(
                grid.world,
                work,
                name_of_rank=grid.name,
                hub=hub,
                listen=listen,
                run=layout.run.name,
                run_dir=folder,
                preload=PRELOAD,
            )
        else:
            status = join(
                place,
                work,
                name_of_rank=grid.name,
                hub=hub,
                listen=listen,
                run=layout.run.name,
                on_failure=(lambda: on_end(1)) if place.rank == 0 else None,
            )
    if leads:
        on_end(status)
    return status
