"""`engine plan`: what a layout would take in time and memory, before anything is launched."""

import argparse
import json
from pathlib import Path
from typing import Any

from engine.cli import plan_charts
from engine.cli.plan_text import plan_text
from engine.cli.reference import print_text
from engine.cli.usage import refuse, refuse_options
from engine.config.toml import load
from engine.planner.hardware.table import find_hardware
from engine.planner.what_if import what_if

ABOUT = "predict time and memory of a layout; nothing is launched, and no torch is needed"
DOES_NOT_FIT = 1  # exit status


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "plan",
        help=ABOUT,
        description=ABOUT,
        epilog="Exit status: 0; 1 if it does not fit; 2 if it is refused.",
    )
    parser.add_argument("layout", nargs="?", help="a TOML file; engine layouts lists the shipped ones")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="override a key of the layout"
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="the machine, such as H100 or H100/roce-400, or its description (default: [hardware] of the layout)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    plan_charts.add_options(parser)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("plan", rest)
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse("engine plan needs a layout as first argument, a TOML file such as layouts/demo.toml")
    layout = load(options.layout, options.overrides + rest)
    hardware = find_hardware(options.hardware) if options.hardware is not None else None
    found = what_if(layout, hardware)
    if drawn := plan_charts.charts(options, layout.run.name, found.job, found.hardware, layout.plan.release):
        text, tree = drawn
        print_text(f"{json.dumps({'layout': options.layout} | tree)}\n" if options.json else text)
        return
    if options.json:
        print_text(f"{json.dumps({'layout': options.layout} | found.as_json())}\n")
    else:
        print_text(plan_text(layout.run.name, found))
    raise SystemExit(DOES_NOT_FIT if found.fits is False else 0)
