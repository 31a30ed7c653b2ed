"""`engine reference`: prints every key of a layout."""

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any

from agents.rundir.standard_streams import discard_output
from engine.cli.usage import refuse


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    commands.add_parser("reference", help="print every key of a layout and its legal values as Markdown")


def main(options: argparse.Namespace, rest: Sequence[str]) -> None:
    from engine.config.reference import reference

    if rest:
        refuse(f"engine reference takes no {rest[0]}")
    print_text(reference())


def print_text(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # `engine reference | head` closes the pipe early: exit quietly
        discard_output()
        raise SystemExit(128 + signal.SIGPIPE) from None
