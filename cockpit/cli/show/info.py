"""``cockpit info``: prints the settings of a run, and where its files are."""

import time

from cockpit.data.run_folders.final_summary import final_summary, has_ended, plain_summary
from cockpit.data.run_folders.run_files import read_files
from cockpit.data.run_folders.run_info import plain_info, run_info
from cockpit.data.sources.connection import CockpitError, target
from cockpit.data.sources.folders import run_folder, told_folder
from cockpit.data.sources.recorded import RunSnapshot, folder_of, is_over, load_snapshot, run_history
from cockpit.data.store import Store
from cockpit.printing import print_json, print_line, print_table, report_missing


def info(run: str | None, as_json: bool) -> int:
    """Print the run's settings and the places of its files (`cockpit.data.run_folders.run_info`) as text or, with
    `as_json`, as one JSON record."""
    loaded = _loaded(run)
    store = loaded.store
    folder = run_folder(run) or told_folder(store)
    sections = run_info(store, read_files(folder) if folder else None, target(run))
    status = report_missing(loaded.missing, loaded.note)
    if as_json:
        record = plain_info(sections)
        record["outcome"] = plain_summary(final_summary(store)) if has_ended(store) else None
        print_json(record)
        return status
    for number, section in enumerate(sections):
        if number:
            print_line("")
        print_line(section.title)
        print_table([[f"  {fact.label}", fact.text] for fact in section.facts])
    return status


def _loaded(run: str | None) -> RunSnapshot:
    """A snapshot of the run; if none can be read but the run's folder exists, an empty snapshot with a note that gives
    the reason."""
    try:
        return run_history(run) if is_over(run) else load_snapshot(run)
    except CockpitError as error:
        if run is None or "://" in run:
            raise
        folder_of(run)  # raises an error if there is no such folder either
        return RunSnapshot(Store(time.monotonic), "", 0, [], f"the state of the run cannot be read: {error}")
