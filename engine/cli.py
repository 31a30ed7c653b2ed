"""Command line of `engine`: parses the arguments of `engine run` and `engine reference`."""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agents.protocol import clean
from agents.rundir.runs import RunError
from agents.rundir.standard_streams import discard_output, open_streams
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.launch.forked_rank import signal_with_parent

FOLDER = (
    "A run's folder is run.dir/NAME-DATE-TIME, such as runs/demo-20261121-120000. It has layout.toml (the complete "
    "layout), engine.log (the output), hub.json (while the run has a hub), hub.log, run.db (the recording), "
    "checkpoints, and failure.txt if a rank failed."
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(sentence: str) -> NoReturn:
    """Print the error on stderr and exit with status 2."""
    sys.stderr.write(f"{clean(sentence)}\n")
    raise SystemExit(2)


def main(arguments: Sequence[str] | None = None) -> None:
    open_streams()
    parser = _Parser(prog="engine", description="Train Mixture-of-Experts transformers in 4D parallel.")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
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
        "--run-dir", type=Path, metavar="DIR", help="the run's folder (default: a new folder in run.dir)"
    )
    run.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue the newest run with this name; DIR: start from the checkpoint there",
    )
    run.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto (default): one GPU per rank if this machine has enough GPUs, else the CPU",
    )
    run.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)
    commands.add_parser("reference", help="print every key of a layout and its legal values as Markdown")
    options, rest = parser.parse_known_args(arguments)  # overrides may come before or after options
    if options.command is None:
        refuse("engine needs a command; legal: run, reference (see engine --help)")
    if options.command == "reference":
        _print_reference(rest)
        return
    if options.resume and "=" in options.resume and not Path(options.resume).exists():
        rest.append(options.resume)  # --resume train.steps=20
        options.resume = ""
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        refuse(f"engine run has no option {unknown[0]}; see engine run --help")
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse(
            "engine run needs a layout as first argument, a TOML file such as layouts/demo.toml "
            "(see engine run --help)"
        )
    if options.end_with_parent:
        signal_with_parent(signal.SIGTERM)
    try:
        overrides = options.overrides + rest
        layout = load(options.layout, overrides)
        resume = options.resume is not None and (not options.resume or Path(options.resume))
        status = _run(
            layout,
            options.json,
            options.hub,
            options.listen,
            options.run_dir,
            resume,
            overrides,
            options.device,
        )
    except (LayoutError, RunError) as error:
        refuse(str(error))
    raise SystemExit(status)


def _print_reference(arguments: Sequence[str]) -> None:
    from engine.config.reference import reference

    if arguments:
        refuse(f"engine reference takes no {arguments[0]}")
    try:
        sys.stdout.write(reference())
        sys.stdout.flush()
    except (
        BrokenPipeError
    ):  # `engine reference | head`: exit with the status of SIGPIPE, as other commands do
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None


def _run(
    layout: Layout,
    as_json: bool,
    hub: str,
    listen: str | None,
    run_dir: Path | None,
    resume: bool | Path,
    overrides: Sequence[str],
    device: str,
) -> int:
    if importlib.util.find_spec("torch") is None:
        refuse("training needs torch; pip install torch, then 'train-cockpit[engine]'")
    from engine.launch.output import Output
    from engine.launch.run import run_layout
    from engine.launch.standard_output import STDERR, STDOUT, standard_stream

    sys.stdout, sys.stderr = standard_stream(STDOUT), standard_stream(STDERR)
    output = Output(layout, as_json)
    return run_layout(
        layout,
        hub=hub,
        listen=listen,
        run_dir=run_dir,
        resume=resume,
        device=device,
        fixed=[override.partition("=")[0].strip() for override in overrides],
        on_folder=output.begin,
        on_start=output.start,
        on_summary=output.step,
        on_checkpoint=output.saved,
        on_end=output.end,
    )
