"""The command `engine`."""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

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
    options, rest = parser.parse_known_args(arguments)  # overrides may stand on either side of the options
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        refuse(f"engine run has no option {unknown[0]}; see engine run --help")
    try:
        layout = load(options.layout, options.overrides + rest)
        status = _run(layout, options.json, options.hub, options.run_dir)
    except (LayoutError, ValueError) as error:
        refuse(str(error))
    raise SystemExit(status)


def _run(layout: Layout, as_json: bool, hub: str, run_dir: Path | None) -> int:
    if importlib.util.find_spec("torch") is None:
        refuse("training needs torch; pip install torch, then 'train-cockpit[engine]'")
    from engine.forked import outlet
    from engine.launch import Place, join, joined_place, launch
    from engine.output import Output
    from engine.place import StopFlag

    sys.stdout = outlet(StopFlag())  # a reader may leave before the last line

    run_dir = run_dir or Path(layout.run.dir) / f"{layout.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Output(layout, as_json)
    grid = layout.ranks

    def work(place: Place) -> None:
        from engine.rank import train

        if place.rank == 0:
            output.start(run_dir.name)
        train(place, layout, output.step)

    place = joined_place(run_dir)
    if place is None:
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
