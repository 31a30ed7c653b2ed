"""A whole run of a layout: folder, corpus, hub, and the ranks, forked here or joined."""

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from agents.runs import RunError
from agents.wire import Step, Summary
from engine.compiler import compiler_refusal
from engine.corpus import read_corpus
from engine.failure import say
from engine.keeper import named_hub
from engine.launch import Place, join, joined_place, launch
from engine.layout import Layout, LayoutError
from engine.resume import find_start, restarted, started
from engine.snapshots import shelf_of

if TYPE_CHECKING:
    from engine.train.snapshot import Saved

# What every rank needs, imported once before the fork. Named, so that this module itself needs no torch.
PRELOAD = ("torch", "torch.distributed", "engine.rank")


def nothing(_: object) -> None:
    """A callback for those who want none."""


def run_layout(
    layout: Layout,
    *,
    hub: str = "auto",
    run_dir: Path | None = None,
    resume: bool | Path = False,
    fixed: Collection[str] = (),
    device: str = "auto",
    on_start: Callable[[str, int | None], None] = lambda _, __: None,
    on_step: Callable[[Step], None] = nothing,
    on_summary: Callable[[Summary], None] = nothing,
    on_snapshot: Callable[["Saved"], None] = nothing,
    on_end: Callable[[int], None] = nothing,
) -> int:
    """Train `layout` and give its exit status: 0 done, 1 a rank failed, 130 Ctrl-C.

    The ranks are forked from this process, or it is one of them where torchrun or Slurm started it. `hub` is "auto"
    (start one, so that a cockpit can attach), "none", or a URL; `run_dir` is the run's folder, a new one under
    `layout.run.dir` if left out. `resume` goes on from a snapshot: True, of this run; a path, of whatever lies there
    (docs/snapshots.md); then `fixed` are keys whose values go before the snapshot's, such as "knobs.recompute".

    `device` is "cpu", "cuda", or "auto": a GPU for each rank where a machine has as many, else the CPU.

    `on_step` is called in every rank after each of its steps, with that rank's own record. The others are called for
    the run as a whole: in rank 0 `on_start` with the run's name and the step it was resumed from, `on_summary` with
    each step of the whole job, one step late, and `on_snapshot` when one was saved or failed; `on_end` with the exit
    status, in the process that outlives the ranks or, joined, in rank 0.

    Call it from the main thread, before any CUDA call and any other torch work: ranks are forks. Raises LayoutError or
    `agents.runs.RunError`, one sentence, for what cannot be.
    """
    if layout.train.compile and device != "cuda" and (refusal := compiler_refusal()):
        raise LayoutError(refusal)
    corpus = read_corpus(layout)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(started(os.environ, os.getppid())))
    named = Path(layout.run.dir) / f"{layout.run.name}-{stamp}"
    start = find_start(
        layout, resume, run_dir, named, restarted(os.environ), fixed, lambda why: say(f"passed over: {why}\n")
    )
    given, layout, run_dir = layout, start.layout, start.run_dir
    resumed = start.snapshot.manifest.step if start.snapshot else None
    snapshot = start.snapshot.folder if start.snapshot else None
    named_hub(hub, run_dir or named)  # refused before a folder is made
    try:
        place = joined_place(run_dir or named)
    except ValueError as error:
        raise RunError(str(error)) from None
    if place is None:
        run_dir = make_folder(run_dir, named)
    elif place.rank == 0:
        make_folder(place.run_dir, named)
    grid = layout.ranks

    def work(place: Place) -> None:
        from engine.rank import train

        if place.rank == 0:
            on_start(place.run_dir.name, resumed)
        shelf = shelf_of(layout, place.run_dir)
        train(place, layout, corpus, on_step, on_summary, on_snapshot, shelf, snapshot, given, device)

    if place is None:
        assert run_dir is not None
        status = launch(
            grid.world,
            work,
            name_of_rank=grid.name,
            hub=hub,
            run=layout.run.name,
            run_dir=run_dir,
            preload=PRELOAD,
        )
    else:
        if place.world != grid.world:
            raise LayoutError(
                f"the layout has {grid.world} ranks, but {place.world} were started; legal: equal"
            )
        status = join(
            place,
            work,
            name_of_rank=grid.name,
            hub=hub,
            run=layout.run.name,
            on_failure=(lambda: on_end(1)) if place.rank == 0 else None,
        )
    if place is None or place.rank == 0:
        on_end(status)
    return status


def make_folder(chosen: Path | None, named: Path) -> Path:
    """The run's folder: the one that was asked for, or a new one."""
    folder = chosen or named
    try:
        # Two runs may begin in one second.
        for again in range(2, 100):
            try:
                folder.mkdir(parents=True, exist_ok=chosen is not None)
                break
            except FileExistsError:
                if chosen is not None:
                    raise
                folder = named.with_name(f"{named.name}-{again}")
    except OSError as error:
        raise RunError(f"the run's folder {folder} cannot be made: {error.strerror}") from None
    return folder
