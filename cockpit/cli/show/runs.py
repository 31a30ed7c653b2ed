"""``cockpit runs``: prints a table of the runs in a folder."""

import time
from pathlib import Path

from cockpit.cli.exit_status import DONE
from cockpit.data import format
from cockpit.data.run_folders.run_list import (
    ListedRun,
    RunLister,
    age_text,
    loss_text,
    plain_run,
    size_text,
    status_text,
    steps_text,
)
from cockpit.data.sources.connection import CockpitError, runs_dir
from cockpit.printing import print_json, print_line, print_table

HEADING = ["run", "state", "steps", "loss", "age", "ranks", "size", "host"]
RIGHT = frozenset({2, 3, 4, 5, 6})


def runs(folder: Path | None, as_json: bool) -> int:
    """Print the runs in `folder`, live ones first; one JSON record per run with `as_json`."""
    place = runs_dir() if folder is None else folder
    try:
        found = RunLister(place).runs()
    except FileNotFoundError:
        if folder is not None:
            raise CockpitError(f"there is no folder {place}; name a folder of runs") from None
        found = []
    except OSError as error:
        raise CockpitError(f"the folder of runs {place} cannot be read: {error.strerror}") from None
    now_s = time.time()
    if as_json:
        for run in found:
            print_json(plain_run(run, now_s))
        return DONE
    if not found:
        print_line(f"there are no runs in {place.absolute()}; start one with: cockpit demo")
        return DONE
    print_table([HEADING, *(row_of(run, now_s) for run in found)], RIGHT)
    for run in found:
        if run.why:
            print_line(f"{run.shown}: {run.why}")
    return DONE


def row_of(run: ListedRun, now_s: float) -> list[str]:
    """The table row of a run: one cell for each column of `HEADING`."""
    return [
        run.shown,
        status_text(run),
        steps_text(run),
        loss_text(run),
        age_text(run, now_s),
        format.grouped(run.ranks),
        size_text(run),
        run.host or format.MISSING,
    ]
