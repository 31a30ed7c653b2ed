"""`engine run`: trains the model that a layout describes."""

import argparse
import importlib.util
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agents.rundir.runs import RunError
from engine.cli.usage import refuse, refuse_options, run_folder
from engine.config.checks.trainable import untrained
from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.forked_rank import signal_with_parent

FOLDER = (
    "A run's folder is run.dir/NAME-DATE-TIME, such as runs/demo-20261121-120000. It has layout.toml (the complete "
    "layout), engine.log (the output), hub.json (while the run has a hub), hub.log, run.db (the recording), "
    "checkpoints, and failure.txt if a rank failed."
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "train a layout on this machine, or as a rank of torchrun or Slurm"
    run = commands.add_parser("run", help=about, description=about, epilog=FOLDER)
    run.add_argument(
        "layout", nargs="?", help="a TOML file, such as layouts/demo.toml; engine reference lists its keys"
    )
    run.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a key of the layout")
    run.add_argument("--json", action="store_true", help="print NDJSON")
    run.add_argument(
        "--hub",
        default="auto",
        metavar="auto|none|URL",
        help="telemetry hub: start one, none, or use the one at URL",
    )
    run.add_argument(
        "--listen",
        metavar="tcp://ADDRESS:PORT|auto",
        help="TCP address on which the hub also listens, for clients with a key",
    )
    run.add_argument(
        "--run-dir",
        type=run_folder,
        metavar="DIR",
        help="the run's folder (default: a new folder in run.dir)",
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR|auto",
        help="continue the newest run with this name; DIR: start a new run from the checkpoint in DIR; auto: continue "
        "the run in --run-dir if it has a checkpoint, else start it, for schedulers that start a job again",
    )
    run.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto (default): one GPU per rank if this machine has enough GPUs, else the CPU",
    )
    run.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        rest.append(options.resume)  # --resume train.steps=20
        options.resume = ""
    refuse_options("run", rest)
    options.restarted = options.resume == "auto" and not Path("auto").exists()
    if options.restarted:
        options.resume = None
        if options.run_dir is None:
            refuse("--resume auto needs --run-dir DIR, the folder that is the same at each start of the job")
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse(
            "engine run needs a layout as first argument, a TOML file such as layouts/demo.toml "
            "(see engine run --help)"
        )
    if options.end_with_parent:
        signal_with_parent(signal.SIGTERM)
    overrides = options.overrides + rest
    layout = load(options.layout, overrides)
    if refusal := untrained(layout):
        refuse(refusal)
    try:
        status = _run(layout, options, overrides)
    except RunError as error:
        refuse(str(error))
    raise SystemExit(status)


def _run(layout: Layout, options: argparse.Namespace, overrides: Sequence[str]) -> int:
    if importlib.util.find_spec("torch") is None:
        refuse("training needs torch; pip install torch, then 'train-cockpit[engine]'")
    from engine.launch.output import Output
    from engine.launch.processes.standard_output import StandardOutput
    from engine.launch.run import run_layout

    with StandardOutput(options.json) as standard_output:
        output = Output(layout, options.json, standard_output.copy_to)
        return run_layout(
            layout,
            hub=options.hub,
            listen=options.listen,
            run_dir=options.run_dir,
            resume=options.resume is not None and (not options.resume or Path(options.resume)),
            restarted=options.restarted,
            device=options.device,
            fixed=[override.partition("=")[0].strip() for override in overrides],
            lost_output=standard_output.take_loss,
            before_exit=standard_output.close,
            on_folder=output.begin,
            on_start=output.start,
            on_summary=output.step,
            on_checkpoint=output.saved,
            on_sample=output.sample,
            on_restart=output.restart,
            on_restarted=output.restarted,
            on_end=output.end,
        )
