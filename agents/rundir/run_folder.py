"""Creates the folder of a run. The name contains the second of the start, so jobs that start in the same second would
choose the same name; each gets a folder of its own."""

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

from agents.rundir.runs import RunError, check_path, folder_name


def stamped(runs_dir: Path, name: str, at_s: float | None = None) -> Path:
    """The usual path of a run's folder: the run's name and the time of its start (None: now). The folder of another run
    may have this path already; `make_folder` then adds a number."""
    return runs_dir / f"{folder_name(name)}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(at_s))}"


def make_folder(
    chosen: Path | None,
    named: Path,
    what: str = "the run's folder",
    beside: Path | None = None,
    number: int | None = None,
) -> Path:
    """Create a folder and return its path. If `chosen` is given, use that folder, which may already exist. Otherwise
    create a new folder with the name `named`; if that name is taken, add a number to it (`number`, if given, then 2, 3,
    ...).

    `beside`: create a folder of the same name there too, so that the name must be free in both places. Raises RunError
    if a folder cannot be created.
    """
    folder = chosen or named
    check_path(folder, what)
    try:
        if chosen is not None:
            chosen.mkdir(parents=True, exist_ok=True)
            return chosen
        for again in itertools.chain([] if number is None else [number], itertools.count(2)):
            if _created(folder, beside):
                break
            folder = named.with_name(f"{named.name}-{again}")
    except OSError as error:
        raise RunError(f"cannot create {what} {folder}: {error.strerror}") from None
    return folder


def _created(folder: Path, beside: Path | None) -> bool:
    """Create the new folder, and one of its name in `beside`; False if one of them exists."""
    made: list[Path] = []
    for path in (folder, *([beside / folder.name] if beside else [])):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not os.path.lexists(path):  # it is a folder above `path` that cannot be created
                raise
            for one in made:
                with suppress(OSError):
                    one.rmdir()
            return False
        made.append(path)
    return True
