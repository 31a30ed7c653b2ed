"""``cockpit wrap``: runs an unmodified torch program, and shows its training as a run."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from agents.protocol.base import RunError
from agents.wrap.command import wrap as run_wrapped
from cockpit.cli.exit_status import USAGE
from cockpit.data.sources.connection import CockpitError

ABOUT = """run a torch program, unchanged, and watch its training: each process that steps an optimizer becomes a rank
of a run. The program keeps its output, its signals and its exit status (docs/join/wrap.md)."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CockpitError(f"{message} (see {self.prog} --help)")


def wrap(words: Sequence[str]) -> int:
    """Replace this process with the wrapped command. Returns only if that command does not exist."""
    parser = _Parser(prog="cockpit wrap", description=ABOUT)
    parser.add_argument("--run", metavar="NAME", help="name of the run (default: that of the script)")
    parser.add_argument(
        "--hub", metavar="HUB", default="auto", help="auto: start a hub (default); or the name or URL of one"
    )
    parser.add_argument("command", help="such as python, torchrun or accelerate")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    options = parser.parse_args(words)
    try:
        run_wrapped([options.command, *options.words], options.run, options.hub)
    except RunError as error:
        raise CockpitError(str(error)) from None
    return USAGE
