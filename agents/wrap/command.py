"""Starts the wrapped command, with the environment variables that make its Python processes install the hooks. The
command replaces this process (`exec`), so streams, signals and the exit status need no forwarding.
"""

import getopt
import itertools
import os
import re
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.protocol.base import RunError
from agents.rundir.hub_supervisor import say

STARTUP = Path(__file__).parent / "startup"
WITHOUT = "cockpit wrap: the program runs without the cockpit"
WATCHED, RUN, HUB = "COCKPIT_WRAP", "COCKPIT_WRAP_RUN", "COCKPIT_WRAP_HUB"


def wrapped_environment(environ: Mapping[str, str], run: str | None, hub: str) -> dict[str, str]:
    """The environment variables for the wrapped command. `run`: the name of the run; None: the name of the script."""
    if run is not None and not 0 < len(run) <= 64:
        raise RunError("a run's name has 1 to 64 characters")
    before = environ.get("PYTHONPATH")
    path = os.pathsep.join([str(STARTUP), *([before] if before else [])])
    added = {WATCHED: "1", HUB: hub, "PYTHONPATH": path} | ({RUN: run} if run else {})
    return {**environ, **added}


def ignores_startup(words: Sequence[str]) -> str:
    """The option with which a Python interpreter ignores `STARTUP`, such as ``-I``; "" if there is none."""
    if not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return ""
    try:
        options = [option for option, _ in getopt.getopt(list(words[1:]), "bBc:dEhiIm:OPqsSuvVW:xX:")[0]]
    except getopt.GetoptError:
        return ""
    own = itertools.takewhile(
        lambda option: option not in ("-c", "-m"), options
    )  # the others are the program's
    return next((option for option in own if option in ("-I", "-E", "-S")), "")


def wrap(words: Sequence[str], run: str | None = None, hub: str = "auto") -> None:
    """Replace this process with the command `words`. Raises RunError if there is no such command."""
    environ = wrapped_environment(os.environ, run, hub)
    if ignored := ignores_startup(words):
        say(f"{WITHOUT}: python {ignored} ignores PYTHONPATH or sitecustomize.py\n")
    program = shutil.which(words[0])
    if program is None:
        raise RunError(
            f"there is no command {words[0]}; give a program, such as python train.py or torchrun train.py"
        )
    # Python ignores SIGPIPE, and a command would inherit that.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execve(program, list(words), environ)
    except OSError as error:
        raise RunError(f"{words[0]} cannot be started: {error.strerror}") from None
