"""Facts about the start of a run: the user, the versions, the command, and where the run's files are. The leader sends
these facts to the hub in its `Hello` message.
"""

import getpass
import importlib.metadata
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agents.protocol import Value, clean

LONGEST: Final = 256  # maximum length of a fact
DISTRIBUTION: Final = "train-cockpit"


def provenance(
    folder: Path | None = None, checkpoints: Path | None = None, command: Sequence[str] = ()
) -> dict[str, Value]:
    """The facts `release`, `python`, `user` and, if given, `folder`, `checkpoints` and `command` (as a shell line).

    A path that exceeds the maximum length of a fact, or cannot be sent as text, is left out: another text would name
    another file.
    """
    facts: dict[str, Value] = {
        "release": release(),
        "python": platform.python_version(),
        "user": clean(user())[:LONGEST],
    }
    for name, path in (("folder", folder), ("checkpoints", checkpoints)):
        if path and len(whole := str(path.absolute())) <= LONGEST and whole == clean(whole):
            facts[name] = whole
    if command:
        line = command_line(command)
        facts["command"] = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    return facts


def release() -> str:
    """The version of this package; "unknown" if it is not installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def user() -> str:
    """The user of this process; "unknown" if the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def command_line(command: Sequence[str]) -> str:
    """`command` as one shell line that starts with the program's name, without its path. ``python -m NAME`` becomes
    ``NAME``."""
    program = Path(command[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return clean(shlex.join([name, *command[1:]]))
