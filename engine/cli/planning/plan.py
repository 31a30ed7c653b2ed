"""`engine plan`: predicts the time and memory of a layout without launching it."""

import argparse
import json
from pathlib import Path
from typing import Any

from engine.cli.planning import plan_charts
from engine.cli.planning.own_model import own_plan, own_plan_text
from engine.cli.planning.plan_text import plan_text
from engine.cli.planning.search_text import search_text
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options
from engine.config.layout import Layout
from engine.config.toml import load
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import find_hardware
from engine.planner.search.explain import Neighbour, neighbours
from engine.planner.search.search import MOST_RANKS, MOST_SHOWN, Result, search
from engine.planner.search.space import Choice
from engine.planner.what_if import WhatIf, what_if

ABOUT = "predict time and memory of a layout; nothing is launched, and no torch is needed"
DOES_NOT_FIT = 1  # exit status


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "plan",
        help=ABOUT,
        description=ABOUT,
        epilog="Exit status: 0 if the layout fits, 1 if it does not fit, 2 if it is refused.",
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
    parser.add_argument("--search", action="store_true", help="search for the fastest layouts that fit")
    parser.add_argument("--top", metavar="K", help="with --search: number of results (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    plan_charts.add_options(parser)


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("plan", rest)
    if options.layout is None or ("=" in options.layout and not Path(options.layout).exists()):
        refuse("engine plan needs a layout as first argument, a TOML file such as layouts/demo.toml")
    layout = load(options.layout, options.overrides + rest)
    hardware = find_hardware(options.hardware) if options.hardware is not None else None
    if options.search:
        if chart := next((name for name in ("roofline", "scaling", "svg") if getattr(options, name)), None):
            refuse(f"--search and --{chart} cannot be combined; legal: one of them")
        _search(options, layout, hardware)
        return
    if options.top is not None:
        refuse("--top requires --search")
    if layout.model.own and not any(getattr(options, name) for name in ("roofline", "scaling", "svg")):
        plan = own_plan(layout)
        print_text(
            f"{json.dumps({'layout': options.layout} | plan)}\n"
            if options.json
            else own_plan_text(layout.run.name, plan)
        )
        return
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


def _search(options: argparse.Namespace, layout: Layout, hardware: Hardware | None) -> None:
    ranks = _whole("--gpus", options.gpus, layout.ranks.world, MOST_RANKS)
    top = _whole("--top", options.top, 5, MOST_SHOWN)
    found = search(layout, ranks, hardware, top)
    around = neighbours(layout, found.hardware, found.best[0]) if found.best else []
    if options.json:
        print_text(f"{json.dumps({'layout': options.layout} | _as_json(found, around))}\n")
    else:
        print_text(search_text(options.layout, ranks, found, around))
    raise SystemExit(0 if found.best else DOES_NOT_FIT)


def _as_json(found: Result, around: list[Neighbour]) -> dict[str, Any]:
    """The result as JSON with stable key names (docs/plan/planner.md)."""
    return {
        "counts": found.counts,
        "tied": found.tied,
        "best": [
            _choice(found, one.choice, one.plan) | {"may_be_fastest": candidate}
            for one, candidate in zip(found.best, found.candidates, strict=True)
        ],
        "nearest": _choice(found, found.nearest.choice, found.nearest.plan) if found.nearest else None,
        "changes": [
            {
                "change": one.change,
                "why": one.why,
                "step_s": one.seconds,
                "order": one.order,
                "overrides": one.choice.overrides(found.layout),
            }
            for one in around
        ],
    }


def _choice(found: Result, choice: Choice, plan: WhatIf) -> dict[str, Any]:
    return {"overrides": choice.overrides(found.layout), "plan": plan.as_json()}


def _whole(option: str, given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not given.isascii() or not given.isdigit() or len(given) > 9:
        refuse(f"{option} = {given[:40]} is not legal; legal: a whole number from 1 to {most}")
    return int(given)
