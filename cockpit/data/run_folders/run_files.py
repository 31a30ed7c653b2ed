"""Reads the files in a run's folder that contain the run's settings and paths, with a limit on their size."""

from dataclasses import dataclass, field
from pathlib import Path

from agents.rundir.bounded_read import read_ordinary
from agents.rundir.failure_file import FAILURE_FILE
from agents.rundir.hub_file import HUB_FILE, HubFile, read_hub_file
from agents.rundir.runs import COMMANDS_FILE, HUB_LOG, RECORD_FILE, RunError
from cockpit.data import format
from cockpit.data.comparison.compared_runs import LAYOUT_BYTES, LAYOUT_FILE, read_layout
from cockpit.data.sources.engine_process import LOG

CHECKPOINTS = "checkpoints"
SCENARIO = "scenario.toml"

# The files that a run's folder may have, and the word for each.
NAMES = {
    "layout": LAYOUT_FILE,
    "scenario": SCENARIO,
    "console output": LOG,
    "hub log": HUB_LOG,
    "recording": RECORD_FILE,
    "commands": COMMANDS_FILE,
    "hub file": HUB_FILE,
    "checkpoints": CHECKPOINTS,
    "failure": FAILURE_FILE,
}


@dataclass(frozen=True)
class RunFiles:
    """The files in a run's folder. `sizes`: the size in bytes of each existing file (None for a folder), by the file's
    key in `NAMES`.
    """

    folder: Path
    sizes: dict[str, int | None] = field(default_factory=dict)
    layout: dict[str, str] = field(default_factory=dict)  # the flattened keys of the layout file
    layout_text: tuple[str, ...] = ()  # the lines of the layout file
    hub: HubFile | None = None
    hub_problem: str = ""  # why the hub file cannot be read


def read_files(folder: Path) -> RunFiles:
    """Look up the files of `NAMES` in a run's folder, and read its layout file and its `hub.json`. Files that cannot be
    read are left out."""
    sizes: dict[str, int | None] = {}
    for word, name in NAMES.items():
        try:
            path = folder / name
            sizes[word] = None if path.is_dir() else path.stat().st_size
        except OSError:
            continue
    hub, problem = None, ""
    if "hub file" in sizes:
        try:
            hub = read_hub_file(folder)
        except RunError as error:
            problem = str(error)
    return RunFiles(folder, sizes, read_layout(folder), _layout_lines(folder), hub, problem)


def _layout_lines(folder: Path) -> tuple[str, ...]:
    try:
        text = read_ordinary(folder / LAYOUT_FILE, LAYOUT_BYTES).decode(errors="replace")
    except OSError:
        return ()
    return tuple(format.clean(line) for line in text.splitlines())
