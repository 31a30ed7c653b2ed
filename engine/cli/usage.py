"""Reports usage errors: prints one sentence on stderr and exits with status 2."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from agents.protocol import clean


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(sentence: str) -> NoReturn:
    """Print the error on stderr and exit with status 2."""
    sys.stderr.write(f"{clean(sentence)}\n")
    raise SystemExit(2)


def run_folder(text: str) -> Path:
    """The path given with --run-dir. An empty string is refused, because as a path it means the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name is not legal; legal: the name of a folder")
    return Path(text)


def refuse_options(command: str, rest: Sequence[str]) -> None:
    """Refuse arguments that look like options; the error names the first such argument."""
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        refuse(f"engine {command} has no option {unknown[0]}; see engine {command} --help")
