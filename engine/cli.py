"""The command `engine`."""

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agents.runs import RunError
from engine.forked import signal_with_parent
from engine.layout import Layout, LayoutError, load

# What every rank needs, imported once before the fork. Named, so that this module itself needs no torch.
PRELOAD = ("torch", "torch.distributed", "engine.rank")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(sentence: str) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _Parser(prog="engine", description="Train Mixture-of-Experts transformers in 4D parallel.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    run = commands.add_parser("run", help="train a layout on this machine, or as a rank of torchrun or Slurm")
    run.add_argument("layout", help="a TOML file, such as layouts/demo.toml")
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="lay over the file's values")
    run.add_argument("--json", action="store_true", help="print NDJSON")
    run.add_argument(
        "--hub", default="auto", metavar="auto|none|URL", help="telemetry: own hub, none, or that one"
    )
    run.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder; absent: one in run.dir")
    run.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args(arguments)  # overrides may stand on either side of the options
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        refuse(f"engine run has no option {unknown[0]}; see engine run --help")
    if options.end_with_parent:
        signal_with_parent(signal.SIGTERM)
    try:
        layout = load(options.layout, options.overrides + rest)
        status = _run(layout, options.json, options.hub, options.run_dir)
    except (LayoutError, RunError) as error:
        refuse(str(error))
    raise SystemExit(status)


def _run(layout: Layout, as_json: bool, hub: str, run_dir: Path | None) -> int:
    if importlib.util.find_spec("torch") is None:
        refuse("training needs torch; pip install torch, then 'train-cockpit[engine]'")
    from engine.corpus import read_corpus
    from engine.forked import outlet
    from engine.keeper import named_hub
    from engine.launch import Place, join, joined_place, launch
    from engine.output import Output
    from engine.place import StopFlag

    sys.stdout = outlet(StopFlag())  # a reader may leave before the last line
    corpus = read_corpus(layout)
    named = Path(layout.run.dir) / f"{layout.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    named_hub(hub, run_dir or named)  # refused before a folder is made
    try:
        place = joined_place(run_dir or named)
    except ValueError as error:
        refuse(str(error))
    if place is None:
        run_dir = make_folder(run_dir, named)
    elif place.rank == 0:
        make_folder(place.run_dir, named)
    output = Output(layout, as_json)
    grid = layout.ranks

    def work(place: Place) -> None:
        from engine.rank import train

        if place.rank == 0:
            output.start(place.run_dir.name)
        train(place, layout, corpus, output.step)

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
            on_failure=(lambda: output.end(1)) if place.rank == 0 else None,
        )
    if place is None or place.rank == 0:
        output.end(status)
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
        refuse(f"the run's folder {folder} cannot be made: {error.strerror}")
    return folder
