"""`engine completion`: prints the completion script for a shell."""

import argparse
from typing import Any

from engine import layouts
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options
from engine.completion import ABOUT, FILES, FOLDERS, add_options, layout_keys, one_of, script


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    add_options(commands.add_parser("completion", help=ABOUT), "engine")


def main(options: argparse.Namespace, rest: list[str]) -> None:
    from engine.planner.hardware.table import names

    refuse_options("completion", rest)
    if rest:
        refuse(f"engine completion takes one shell; legal: leave out {rest[0]}")
    completions = {
        "layout": one_of(layouts.names(), files=True),
        "overrides": one_of([f"{key}=" for key in layout_keys()]),
        "scenario": one_of(layouts.names(layouts.SCENARIOS), files=True),
        "hardware": one_of(names(), files=True),
        **dict.fromkeys(("source", "target", "out", "run_dir", "resume", "folder", "check"), FOLDERS),
        **dict.fromkeys(("inputs", "into", "svg", "tokenizer"), FILES),
    }
    try:
        print_text(script(options.parser, options.shell, completions))
    except ModuleNotFoundError as error:
        if error.name != "shtab":
            raise
        refuse("engine completion needs shtab: pip install shtab")
