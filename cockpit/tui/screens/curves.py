"""Screen 6: curves of any metric over the steps of the run, with marks at its knob changes, alerts and other events,
and with the curves of other runs for comparison."""

import time
from collections.abc import Sequence
from pathlib import Path

from agents.rundir.runs import RECORD_FILE, Run, list_runs
from cockpit.data import format
from cockpit.data.curves.job_metrics import CURVE_METRICS, reported
from cockpit.data.sources.connection import runs_dir
from cockpit.data.sources.folders import run_folder
from cockpit.data.store import Store
from cockpit.tui.dialogs.choose import Choose, Row
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.session import Session
from cockpit.tui.widgets.curves.charts import Charts
from cockpit.tui.widgets.curves.differences import Differences
from cockpit.tui.widgets.curves.marks import MarkList
from cockpit.tui.widgets.panel import Panel

REMOVE = "-"


class Curves(RunScreen):
    """Curves of the run's metrics. On a wide terminal, a panel beside the curves lists the run's knob changes, alerts
    and other events that the charts mark, and another one shows how the settings of compared runs differ."""

    NAME = "curves"
    SOLO = frozenset({"-narrow", "-medium"})

    def __init__(self, session: Session) -> None:
        self.charts = Charts(session)
        self.marks = MarkList(self.charts)
        self.differences = Differences(session)
        super().__init__(session)

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((self.charts,), (self.marks, self.differences))

    def update_from(self, store: Store, tick: int) -> None:
        comparison = self.session.comparison
        self.differences.display = bool(comparison.others or comparison.loading or comparison.error)
        super().update_from(store, tick)

    def _reachable(self) -> list[str]:
        return [name for name in super()._reachable() if self._panels[name].display or name != "differences"]

    # --------------------------------------------------------------------------------------- panels

    def action_turn(self, by: int) -> None:
        """Go to the next chart and, after the last one, to the next panel."""
        if self._current != "charts" or not self.charts.turn(by):
            super().action_turn(by)

    def action_zoom(self) -> None:
        """Maximise the current panel; in the charts panel, show only the current chart."""
        super().action_zoom()
        self.charts.choices.alone = self._zoomed and self._current == "charts"
        self.charts.redraw()

    async def action_back(self) -> None:
        """Go back one level: from another panel to the charts, from a single chart to all charts, or to the previous
        screen."""
        if self._current != "charts" and not self._zoomed:
            self.charts.focus()
            return
        self.charts.choices.alone = False
        await super().action_back()

    def action_marks(self) -> None:
        self.marks.open()

    # ---------------------------------------------------------------------------------------- lists

    def action_metrics(self) -> None:
        """Choose the metrics to show."""
        store = self.shown
        with store.lock:
            known = reported(store.state)
            newest = store.summary
            shown = [metric.key for metric in self.charts.metrics(store)]
        rows = [
            Row(
                metric.key,
                metric.title,
                f"{metric.with_unit(metric.of(newest)) if newest else '':>12}   {metric.about}"
                if metric in known
                else f"{format.MISSING:>12}   not reported by this run",
            )
            for metric in CURVE_METRICS
        ]
        current = shown[min(self.charts.choices.current, len(shown) - 1)]

        def show(keys: list[str] | None) -> None:
            if keys:
                self.charts.choose(keys)

        self.app.push_screen(Choose("Metrics", rows, current, shown, several=True), show)

    def action_versus(self) -> None:
        """Let the user choose a run to compare with."""
        comparison = self.session.comparison
        own = run_folder(self.session.source.target)
        there = {one.folder for one in comparison.others}
        runs = [run for run in list_runs(runs_dir()) if own is None or run.folder.resolve() != own.resolve()]
        runs.sort(key=_recorded_s, reverse=True)
        rows = [Row(str(run.folder), run.name, _about(run, run.folder in there)) for run in runs]
        if comparison.others:
            rows.append(Row(REMOVE, "none", "show this run only"))
        if not rows:
            self.app.notify(f"there is no other run in {runs_dir().absolute()}", markup=False)
            return

        def compare(keys: list[str] | None) -> None:
            for key in keys or ():
                if key == REMOVE:
                    comparison.remove()
                elif Path(key) in there:
                    comparison.remove(Path(key))
                else:
                    comparison.add(Path(key), self.session.store, self.session.source.target)

        self.app.push_screen(Choose("Compare with", rows), compare)


def _recorded_s(run: Run) -> float:
    """The time of the last write to the recording; 0 if there is no recording."""
    try:
        return (run.folder / RECORD_FILE).stat().st_mtime
    except OSError:
        return 0.0


def _about(run: Run, shown: bool) -> str:
    """A one-line description of a run: its state, and when it was last recorded."""
    state = "live" if run.live else "ended"
    recorded_s = _recorded_s(run)
    if not recorded_s:
        return f"{state} · not recorded"
    age = format.age(max(0.0, time.time() - recorded_s))
    return f"{state} · recorded until {age} ago{' · shown: enter removes it' if shown else ''}"
