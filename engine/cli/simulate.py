"""`engine simulate`: simulates a layout on a cluster of any size, without torch."""

import argparse
import importlib.util
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.rundir.runs import RunError
from engine.cli.usage import refuse, refuse_options, run_folder
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.toml import load
from engine.launch.processes.forked_rank import signal_with_parent

if TYPE_CHECKING:
    from engine.planner.hardware.description import Hardware

ABOUT = "simulate a layout on a cluster of any size: no training, but the telemetry and knobs of a real run"
EPILOG = (
    "A run's folder is run.dir/NAME-DATE-TIME, such as runs/demo-20261121-120000. It has layout.toml (the complete "
    "layout), engine.log (the output), hub.json (while the run has a hub), hub.log and run.db (the recording)."
)
SLOWEST, FASTEST = 1e-3, 1e6  # simulated seconds per real second
DEFAULT_HARDWARE = "H100"


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("simulate", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument("layout", nargs="?", help="a TOML file, such as layouts/demo.toml")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override a key of the layout"
    )
    parser.add_argument("--steps", metavar="N", help="number of steps (default: train.steps of the layout)")
    parser.add_argument(
        "--speed",
        default="1",
        metavar="X|max",
        help="simulated seconds per real second (default 1: real time)",
    )
    parser.add_argument(
        "--scenario",
        type=Path,
        metavar="FILE",
        help="scenario: the faults of the cluster, such as layouts/scenarios/straggler.toml (docs/plan/simulate.md)",
    )
    parser.add_argument("--seed", metavar="N", help="seed of the noise (default: run.seed of the layout)")
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=f"devices and links (default: [hardware] of the layout, else {DEFAULT_HARDWARE})",
    )
    parser.add_argument("--json", action="store_true", help="print NDJSON")
    parser.add_argument(
        "--hub",
        default="auto",
        metavar="auto|none|URL",
        help="telemetry hub: start one, none, or use the one at URL",
    )
    parser.add_argument(
        "--listen",
        metavar="tcp://ADDRESS:PORT|auto",
        help="TCP address on which the hub also listens (requires a key)",
    )
    parser.add_argument(
        "--run-dir",
        type=run_folder,
        metavar="DIR",
        help="the run's folder (default: a new folder in run.dir)",
    )
    parser.add_argument("--end-with-parent", action="store_true", help=argparse.SUPPRESS)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("simulate", rest)
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse(
            "engine simulate needs a layout as first argument, a TOML file such as layouts/demo.toml "
            "(see engine simulate --help)"
        )
    if importlib.util.find_spec("numpy") is None:
        refuse("engine simulate needs numpy: pip install 'train-cockpit[simulate]'")
    if options.end_with_parent:
        signal_with_parent(signal.SIGTERM)
    try:
        status = _simulate(options, options.overrides + rest)
    except RunError as error:
        refuse(str(error))
    raise SystemExit(status)


def _simulate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from engine.launch.output import Output
    from engine.launch.processes.standard_output import StandardOutput
    from engine.simulate.run import simulate_layout
    from engine.simulate.scenario import Scenario, load_scenario

    steps = [] if options.steps is None else [f"train.steps={_whole('--steps', options.steps, 1)}"]
    layout = load(options.layout, [*overrides, *steps])
    seed = None if options.seed is None else _whole("--seed", options.seed, 0)
    speed = _speed(options.speed)
    scenario = load_scenario(options.scenario) if options.scenario else Scenario()
    hardware = _hardware(layout, options.hardware)
    with StandardOutput(options.json) as standard_output:
        output = Output(layout, options.json, standard_output.copy_to, simulated=True)
        return simulate_layout(
            layout,
            hardware,
            scenario,
            seed=seed,
            speed=speed,
            hub=options.hub,
            listen=options.listen,
            run_dir=options.run_dir,
            lost_output=standard_output.take_loss,
            on_folder=output.begin,
            on_start=output.start,
            on_summary=output.step,
            on_end=output.end,
        )


def _hardware(layout: Layout, given: str | None) -> "Hardware":
    from engine.planner.hardware.table import find_hardware
    from engine.planner.what_if import assumed_hardware

    if given is not None:
        return find_hardware(given)
    return assumed_hardware(layout) or find_hardware(DEFAULT_HARDWARE)


def _whole(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or not least <= int(text[:12]) < 2**31:
        raise LayoutError(
            f"{option} {shown(text)} is not legal; legal: a whole number from {least} to {2**31 - 1}"
        )
    return int(text)


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not SLOWEST <= speed <= FASTEST:
        raise LayoutError(
            f"--speed {shown(text)} is not legal; legal: max, or simulated seconds per real second, "
            f"{SLOWEST:g} to {FASTEST:g}"
        )
    return speed
