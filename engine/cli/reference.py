"""`engine reference`: prints every key of a layout."""

import argparse
from collections.abc import Sequence
from typing import Any

from engine.cli.printing import print_text
from engine.cli.usage import refuse


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    commands.add_parser("reference", help="print every key of a layout and its legal values as Markdown")


def main(options: argparse.Namespace, rest: Sequence[str]) -> None:
    from engine.config.reference import reference

    if rest:
        refuse(f"engine reference takes no {rest[0]}")
    print_text(reference())
