"""The `--version` option of the commands `engine` and `cockpit`."""

import argparse
import sys
from typing import Any

PACKAGE = "train-cockpit"


def version() -> str:
    """The version of the installed package, such as ``0.1.0``."""
    from importlib import metadata  # slow to import, and no other command needs it

    return metadata.version(PACKAGE)


class ShowVersion(argparse.Action):
    """Print the command's name and version, and exit."""

    def __init__(self, option_strings: list[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        sys.stdout.write(f"{parser.prog} {version()}\n")
        parser.exit()
