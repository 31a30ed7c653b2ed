"""Starts the wrapped command, with the environment variables that make its Python processes install the hooks. The
command replaces this process (`exec`), so streams, signals and the exit status need no forwarding.
"""

import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from agents.protocol.base import RunError

STARTUP = Path(__file__).parent / "startup"
WATCHED, RUN, HUB = "COCKPIT_WRAP", "COCKPIT_WRAP_RUN", "COCKPIT_WRAP_HUB"


def wrapped_environment(environ: Mapping[str, str], run: str | None, hub: str) -> dict[str, str]:
    """The environment variables for the wrapped command. `run`: the name of the run; None: the name of the script."""
    if run is not None and not 0 < len(run) <= 64:
        raise RunError("a run's name has 1 to 64 characters")
    before = environ.get("PYTHONPATH")
    path = os.pathsep.join([str(STARTUP), *([before] if before else [])])
    added = {WATCHED: "1", HUB: hub, "PYTHONPATH": path} | ({RUN: run} if run else {})
    return {**environ, **added}


def wrap(words: Sequence[str], run: str | None = None, hub: str = "auto") -> None:
    """Replace this process with the command `words`. Raises RunError if there is no such command."""
    environ = wrapped_environment(os.environ, run, hub)
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
