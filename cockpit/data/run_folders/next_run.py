"""The run that the operator wants to open next. The cockpit checks that it can be opened before it closes the current
run's screen."""

from dataclasses import dataclass
from pathlib import Path

from cockpit.data.run_folders.run_list import ListedRun
from cockpit.data.sources.connection import CockpitError, address
from cockpit.data.sources.recorded import open_recording


@dataclass(frozen=True)
class NextRun:
    """A run to open. If `live` is true, the cockpit attaches to the run's hub; otherwise it plays the run's
    recording."""

    folder: Path
    live: bool

    def check(self, operator: bool = False) -> None:
        """Raise CockpitError, with one sentence, if the run cannot be opened. The check may take a few seconds."""
        if self.live:
            address(str(self.folder.absolute()), operator)
        else:
            open_recording(str(self.folder.absolute())).close()


def next_run(run: ListedRun) -> NextRun:
    """Choose whether to attach to a listed run or to play its recording. Raises CockpitError if the run has nothing to
    show."""
    if not run.shows:
        raise CockpitError(f"{run.shown} has nothing to show: {run.why or run.status.value}")
    return NextRun(run.folder, run.shows == "live")
