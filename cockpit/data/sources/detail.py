"""Reads the values at each visible step from the recording of the run, in a separate thread, for a live screen.

A hub and its clients keep older steps only in buckets (`agents.state.metric_curves`). A cockpit process on the hub's
machine can read the recording file that the hub is writing. A process that cannot read the recording shows the bucketed
values instead.
"""

import contextlib
import threading

from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.rundir.hub_file import check_readable
from agents.rundir.runs import RECORD_FILE, RunError
from cockpit.data.curves.view import View
from cockpit.data.history.experts import ExpertHistory
from cockpit.data.sources.folders import run_folder
from cockpit.data.sources.past_experts import add_past
from cockpit.data.store import Store

POLL_S = 0.25  # a view that changes within this time is not read
# Pause between rows of the recording, so that the screen stays responsive while many are read.
YIELD_S = 0.0005
RETRY_S = 30.0  # the recording of a run that has just begun may not exist yet


class DetailReader:
    """Reads from the run's recording: every step of the visible range, into `CurveView.detail`, and once, the expert
    load from before this screen was opened. `target`: the run's name or folder; for a run given by URL, the folder is
    unknown and nothing is read."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._experts_missing = True  # whether the expert load before the first message has not been read
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, store: Store) -> None:
        self._thread = threading.Thread(target=self._run, args=(store,), name="cockpit-detail", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join(2.0)

    def _run(self, store: Store) -> None:
        seen: View | None = None
        pause_s = POLL_S
        while not self._stop.wait(pause_s):
            pause_s = POLL_S
            if self._experts_missing and store.state.experts:
                self._experts_missing = False
                with contextlib.suppress(RecordingError, RunError, OSError):
                    self._read_experts(store)
            with store.lock:
                wanted = store.curve_view.wanted_detail()
            if wanted and wanted == seen:
                # Steps that cannot be read stay in buckets, which the chart marks, so the error is not logged.
                with contextlib.suppress(RecordingError, RunError, OSError):
                    self._read(store, wanted)
                    continue
                pause_s = RETRY_S
            seen = wanted

    def _open(self) -> Recording:
        folder = run_folder(self._target)
        if folder is None:
            raise RunError("the folder of the run is not known")
        check_readable(folder)
        return Recording(folder / RECORD_FILE)

    def _read_experts(self, store: Store) -> None:
        """Read the recorded expert loads, so that the history also covers the steps before this screen was opened."""
        recording = self._open()
        history = ExpertHistory()
        try:
            end = recording.span()
            add_past(history, recording, end.last_epoch, end.last_seq, lambda: self._stop.wait(YIELD_S))
        finally:
            recording.close()
        with store.lock:
            if len(history.loads):
                history.extend(store.expert_history)
                store.set_expert_history(history)

    def _read(self, store: Store, view: View) -> None:
        recording = self._open()
        try:
            end = recording.span()
            detail = curve_between(
                recording, *view, end.last_epoch, end.last_seq, lambda: self._cancelled(store, view)
            )
        finally:
            recording.close()
        if detail is not None:
            with store.lock:
                store.curve_view.set_detail(view, detail)

    def _cancelled(self, store: Store, view: View) -> bool:
        """Whether to stop reading the steps of `view`, because `stop` was called or the chart now shows other steps.
        This method is called between two rows of the recording, and also lets other threads run.
        """
        shown = store.curve_view
        moved = shown.steps is None or (shown.steps != view and not shown.follows)
        return self._stop.wait(YIELD_S) or moved
