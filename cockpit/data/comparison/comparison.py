"""The runs that the curves screen compares with the open run. A separate thread reads these runs."""

import queue
import threading
from pathlib import Path

from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.rundir.runs import RECORD_FILE
from cockpit.data.comparison.compared_runs import (
    By,
    Difference,
    RunCurves,
    differences,
    load_run_curves,
    own_curves,
)
from cockpit.data.curves.view import View
from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.detail import YIELD_S
from cockpit.data.sources.folders import run_folder
from cockpit.data.store import Store

MOST = 4  # maximum number of runs beside the open run; more lines cannot be distinguished
POLL_S = 0.25
AGAIN_S = 15.0  # time after which a run that may still be live is read again


class Comparison:
    """The runs whose curves are shown together with those of the open run, the one that the screens show. Any thread
    may call the methods. `revision` increases with each change; changes are made under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.revision = 0
        self.by = By.STEP
        self.own: RunCurves | None = None  # the run of the screen; None until a run is compared
        self.others: list[RunCurves] = []
        self.error = ""  # why the last chosen run cannot be shown
        self.loading = ""  # name of the run that is being read
        self._store: Store | None = None
        self._target = ""
        self._wanted: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._view: View | None = None
        self._thread: threading.Thread | None = None

    def add(self, folder: Path, store: Store, target: str) -> None:
        """Read the run in `folder`, and show it together with the open run (`store`, named `target`)."""
        with self.lock:
            self._store, self._target = store, target
            self.loading, self.error = folder.name, ""
            self.revision += 1
        self._wanted.put(folder)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cockpit-compare", daemon=True)
            self._thread.start()

    def remove(self, folder: Path | None = None) -> None:
        """Stop showing the run in `folder`; None: stop showing all runs."""
        with self.lock:
            self.others = [one for one in self.others if folder is not None and one.folder != folder]
            self.error, self.revision = "", self.revision + 1

    def align(self, by: By) -> None:
        """Align the runs by step, tokens or time."""
        with self.lock:
            self.by, self.revision = by, self.revision + 1

    def show(self, view: View | None) -> None:
        """Set the range of steps to show. If a run's curves have only buckets of several steps in this range, the value
        of every step is read from the run's recording.
        """
        self._view = view

    def is_known(self, by: By) -> bool:
        """Whether the quantity on the x axis (step, tokens or time) is known for the newest step of every run."""
        runs = [self.own, *self.others]
        return all(
            run is not None and run.last is not None and run.progress.x(by, run.last) is not None
            for run in runs
        )

    def differences(self) -> list[tuple[RunCurves, list[Difference]]]:
        """For each run that is compared with the open run: the keys of its layout, the knobs and other properties whose
        values differ from those of the open run."""
        own = self.own
        return [] if own is None else [(one, differences(own, one)) for one in self.others]

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        seen: View | None = None
        waited_s = 0.0
        while True:
            try:
                folder = self._wanted.get(timeout=POLL_S)
            except queue.Empty:
                view, waited_s = self._view, waited_s + POLL_S
                if waited_s >= AGAIN_S:
                    waited_s = 0.0
                    self._read_own()
                    for one in list(self.others):
                        self._reread(one)
                if view == seen:
                    for one in list(self.others):
                        self._detail(one, view)
                seen = view
            else:
                if folder is None:
                    return
                self._read(folder)

    def stop(self) -> None:
        """End the thread."""
        self._wanted.put(None)

    def _read(self, folder: Path) -> None:
        why = ""
        found: RunCurves | None = None
        try:
            found = load_run_curves(folder)
        except CockpitError as error:
            why = str(error)
        except Exception as error:  # noqa: BLE001 - a damaged file of another run must not end this cockpit
            why = f"{folder} cannot be read: {error}"
        if self.own is None and found:
            self._read_own()
        with self.lock:
            self.loading, self.error = "", why
            if found:
                others = [one for one in self.others if one.folder != folder]
                self.others = [*others, found][-MOST:]
            self.revision += 1

    def _read_own(self) -> None:
        """Read the layout and the elapsed time of the open run. Called every `AGAIN_S` seconds, because the open run
        may still be training."""
        store = self._store
        if store is None:
            return
        with store.lock:
            folder = run_folder(self._target)
            own = own_curves(store, folder, folder.name if folder else store.run)
        with self.lock:
            self.own, self.revision = own, self.revision + 1

    def _reread(self, one: RunCurves) -> None:
        """Read a run again if its recording has grown."""
        if one.folder is None:
            return
        try:
            recording = Recording(one.folder / RECORD_FILE)
            try:
                span = recording.span()
            finally:
                recording.close()
            if (span.last_epoch, span.last_seq) == one.end:
                return
            found = load_run_curves(one.folder)
        except (CockpitError, RecordingError):
            return  # what has been read stays on the screen
        with self.lock:
            self.others = [found if other is one else other for other in self.others]
            self.revision += 1

    def _detail(self, one: RunCurves, view: View | None) -> None:
        """Read the values of every visible step from the run's recording, unless the run's state already contains these
        values."""
        with self.lock:
            if view != one.store.curve_view.steps:
                one.store.curve_view.show(view)
            wanted = one.store.curve_view.wanted_detail()
        if wanted is None or one.folder is None:
            return
        pause = threading.Event()
        try:
            recording = Recording(one.folder / RECORD_FILE)
            try:
                detail = curve_between(
                    recording, *wanted, *one.end, lambda: pause.wait(YIELD_S) or self._view != view
                )
            finally:
                recording.close()
        except RecordingError:
            one.folder = None  # the recording can no longer be read, so the buckets stay
            return
        if detail is not None:
            with self.lock:
                one.store.curve_view.set_detail(wanted, detail)
                self.revision += 1
