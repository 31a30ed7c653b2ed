"""The list of runs in a runs folder: the state of each run, from a few bounded reads.

No error is raised for a folder that cannot be read; the list shows the folder with the reason.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from agents.protocol import Hello
from agents.recording.format import NothingRecordedError, RecordingError
from agents.recording.glance import Glance, glance
from agents.rundir.failure_file import last_failure
from agents.rundir.hub_file import HUB_FILE, CopiedError, HubFile, read_hub_file
from agents.rundir.runs import COMMANDS_FILE, HUB_LOG, RECORD_FILE, RunError
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.sources.engine_process import LOG

TRACES = (HUB_FILE, RECORD_FILE, COMMANDS_FILE, LOG, HUB_LOG)
"""The folder of a run has at least one of these files."""
READERS = (f"{RECORD_FILE}-shm", f"{COMMANDS_FILE}-shm")  # files that SQLite changes even for a reader
MOST_FILES = 2_000  # maximum number of files whose sizes are added
SETTLED_S = 2.0  # a folder is read again if it had changed less than this before it was read


class RunStatus(Enum):
    """The state of a run, as read from its folder; the value is the word that the screen shows."""

    LIVE = "live"
    ELSEWHERE = "elsewhere"  # its hub runs on another machine, so whether it is alive is unknown here
    HUB_DEAD = "hub dead"  # the hub was killed; the ranks may still train
    ENDED = "ended"
    FAILED = "failed"
    RECORDED = "recorded"  # there is a recording without an end: the hub was killed, or the folder is a copy
    UNRECORDED = "unrecorded"  # it has no hub and no recording
    UNREADABLE = "unreadable"


LEVELS = {
    RunStatus.LIVE: Level.GOOD,
    RunStatus.ELSEWHERE: Level.NOTE,
    RunStatus.HUB_DEAD: Level.WARN,
    RunStatus.ENDED: Level.NOTE,
    RunStatus.FAILED: Level.BAD,
    RunStatus.RECORDED: Level.NOTE,
    RunStatus.UNRECORDED: Level.NOTE,
    RunStatus.UNREADABLE: Level.BAD,
}

SHOWS = {
    RunStatus.LIVE: "live",
    RunStatus.ELSEWHERE: "live",
    RunStatus.ENDED: "replay",
    RunStatus.FAILED: "replay",
    RunStatus.RECORDED: "replay",
    RunStatus.HUB_DEAD: "replay",
}
"""How a run in each state is shown; the other states have nothing to show."""


@dataclass(frozen=True)
class ListedRun:
    """A run in the list of runs. A value that the run's folder does not contain is None."""

    folder: Path
    status: RunStatus
    name: str = ""  # name of the run; several folders may have runs with the same name
    simulated: bool = False
    steps: int | None = None  # number of steps done
    planned: int | None = None
    loss: float | None = None
    ranks: int | None = None
    began_s: float | None = None
    last_s: float | None = None  # time of the newest data, or of the newest file
    size_bytes: int | None = None
    size_partial: bool = False  # whether there are more files than were counted
    host: str = ""
    why: str = ""  # one sentence: why the run failed or cannot be read

    @property
    def shown(self) -> str:
        """The name of the folder without control characters, for the screen."""
        return format.clean(self.folder.name)

    @property
    def shows(self) -> str:
        """The mode in which the run can be opened, "live" or "replay"; "" if there is nothing to show."""
        return SHOWS.get(self.status, "")

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the run's newest data was written."""
        return None if self.last_s is None else max(0.0, now_s - self.last_s)


class RunLister:
    """Lists the runs of a folder repeatedly; rereads only folders that may have changed."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self._known: dict[Path, tuple[float, ListedRun]] = {}  # newest time of a file, and the run

    def runs(self) -> list[ListedRun]:
        """All runs: first the live runs, the one that started last on top; then the others, the one with the newest
        data on top."""
        found = {folder: self._read(folder) for folder in run_folders(self.runs_dir)}
        self._known = {folder: known for folder, known in self._known.items() if folder in found}
        return sorted(found.values(), key=_order)

    def _read(self, folder: Path) -> ListedRun:
        changed_s = _changed_s(folder)
        known = self._known.get(folder)
        over = known and known[1].status in (RunStatus.ENDED, RunStatus.FAILED)
        if known and over and changed_s is not None and known[0] == changed_s:
            return known[1]
        run = read_run(folder)
        if changed_s is not None and time.time() - changed_s > SETTLED_S:
            self._known[folder] = changed_s, run
        return run


def run_folders(runs_dir: Path) -> Iterator[Path]:
    """The folders in `runs_dir` that contain files of a run, and those that cannot be read. Raises OSError if
    `runs_dir` itself cannot be read.
    """
    with os.scandir(runs_dir) as entries:
        folders = sorted(Path(entry.path) for entry in entries if _is_folder(entry))
    for folder in folders:
        try:
            names = set(os.listdir(folder))
        except OSError:
            yield folder
            continue
        if names & set(TRACES):
            yield folder


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def read_run(folder: Path) -> ListedRun:
    """The state of one run. Errors are reported in the result, not raised."""
    try:
        return _read_run(folder)
    except (OSError, RunError, RecordingError) as error:
        why = (
            str(error) if isinstance(error, ValueError) else f"{folder}: {getattr(error, 'strerror', error)}"
        )
        return ListedRun(folder, RunStatus.UNREADABLE, last_s=_changed_s(folder), why=format.clean(why))


def _read_run(folder: Path) -> ListedRun:
    hub = None
    with suppress(CopiedError):
        hub = read_hub_file(folder) if (folder / HUB_FILE).exists() else None
    size, partial = _size(folder)
    common: dict[str, Any] = {"size_bytes": size, "size_partial": partial}
    if hub:
        common |= {"name": format.clean(hub.run), "host": format.clean(hub.host)}
        if not hub.here:  # the recording of a hub on another machine cannot be read from here
            since: dict[str, Any] = {"began_s": hub.started_s, "last_s": _changed_s(folder)}
            return ListedRun(folder, RunStatus.ELSEWHERE, **common, **since)
    try:
        end = glance(folder / RECORD_FILE) if (folder / RECORD_FILE).exists() else None
    except NothingRecordedError:
        end = None
    status, why = _status(folder, hub, end)
    common |= {"why": why}
    if end is None:
        began: dict[str, Any] = {"began_s": hub.started_s} if hub else {}
        return ListedRun(folder, status, last_s=_changed_s(folder), **common, **began)
    common |= _reported_facts(end.hello)
    return ListedRun(
        folder,
        status,
        steps=None if end.step is None else end.step + 1 - (end.hello.first_step if end.hello else 0),
        loss=end.loss,
        began_s=end.first_s,
        last_s=end.last_s,
        **common,
    )


def _reported_facts(hello: Hello | None) -> dict[str, Any]:
    """The facts that a rank reports about its run."""
    if hello is None:
        return {}
    planned = hello.facts.get("steps")
    whole = isinstance(planned, int) and not isinstance(planned, bool)
    return {
        "name": format.clean(hello.run),
        "simulated": hello.simulated,
        "planned": planned if whole else None,
        "ranks": hello.world,
        "host": format.clean(hello.host),
    }


def _status(folder: Path, hub: HubFile | None, end: Glance | None) -> tuple[RunStatus, str]:
    """The state of a run as seen from this machine, and a text that explains the state ("" if the run is live or ended
    normally)."""
    if hub and hub.live:
        return RunStatus.LIVE, ""
    failure = last_failure(folder) or (end.failure if end else "")
    if failure:
        return RunStatus.FAILED, format.clean(failure)
    if end and end.ended:
        return RunStatus.ENDED, ""
    if hub:
        return RunStatus.HUB_DEAD, f"its hub, process {hub.pid}, is not alive; the ranks may still train"
    if end is None:
        return RunStatus.UNRECORDED, "it has no hub and no recording"
    return RunStatus.RECORDED, "the recording ends before the run"


def _order(run: ListedRun) -> tuple[bool, float, str]:
    live = run.status is RunStatus.LIVE
    # all live runs have new data, whose times would change the order of the list each second
    return not live, -((run.began_s if live else run.last_s) or 0.0), run.folder.name


def _changed_s(folder: Path) -> float | None:
    """The newest modification time among the files directly in `folder`; None if `folder` is empty or cannot be
    read."""
    try:
        with os.scandir(folder) as entries:
            times = (
                entry.stat(follow_symlinks=False).st_mtime for entry in entries if entry.name not in READERS
            )
            return max(times, default=None)
    except OSError:
        return None


def _size(folder: Path) -> tuple[int, bool]:
    """The total size of the files below `folder`, and whether counting stopped after `MOST_FILES` files and folders."""
    size, count, folders = 0, 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > MOST_FILES:
                        return size, True
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        size += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return size, False


def size_text(run: ListedRun) -> str:
    """The size of a run's folder as text, such as ``3.1 GiB``; it begins with ``>`` if there are more files than were
    counted."""
    return (
        format.MISSING if run.size_bytes is None else f"{'>' * run.size_partial}{bytes_text(run.size_bytes)}"
    )


def bytes_text(size: int) -> str:
    """A size with a binary prefix, such as ``3.1 GiB``."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB")
    place = 0
    while value >= 1024 and place + 1 < len(units):
        value, place = value / 1024, place + 1
    return f"{value:.{1 if place else 0}f} {units[place]}"


def status_text(run: ListedRun) -> str:
    """The run's state as the list shows it, such as `ended`, followed by `SIMULATED` if the run is simulated."""
    return f"{run.status.value} SIMULATED" if run.simulated else run.status.value


def steps_text(run: ListedRun) -> str:
    """The numbers of steps done and planned, as text such as ``1 240/5 000``."""
    goal = f"/{format.grouped(run.planned)}" if run.planned else ""
    return f"{format.grouped(run.steps)}{goal}"


def loss_text(run: ListedRun) -> str:
    return format.MISSING if run.loss is None else f"{run.loss:.4f}"


def age_text(run: ListedRun, now_s: float) -> str:
    """The time since the run's newest data was written, as text; in days if it is at least two days."""
    age_s = run.age_s(now_s)
    if age_s is None:
        return format.MISSING
    return format.age(age_s) if age_s < 48 * 3600 else f"{age_s / 86400:.0f} d"


def plain_run(run: ListedRun, now_s: float) -> dict[str, Any]:
    """The JSON object that ``--json`` prints for one run."""
    return {
        "folder": os.fsencode(run.folder).decode(errors="replace"),
        "name": run.name or None,
        "state": run.status.value,
        "simulated": run.simulated,
        "steps": run.steps,
        "planned": run.planned,
        "loss": run.loss,
        "ranks": run.ranks,
        "began_s": run.began_s,
        "last_s": run.last_s,
        "age_s": run.age_s(now_s),
        "bytes": run.size_bytes,
        "bytes_partial": run.size_partial,
        "host": run.host or None,
        "why": run.why or None,
    }
