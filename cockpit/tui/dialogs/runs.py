"""The list of runs as a modal screen, to open another run or to mark runs for comparison with the current run."""

from pathlib import Path

from textual.app import ComposeResult

from cockpit.data.comparison.comparison import MOST
from cockpit.data.run_folders.next_run import NextRun, next_run
from cockpit.data.sources.connection import CockpitError, runs_dir
from cockpit.data.store import Store
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.dialogs.help import Help
from cockpit.tui.keys.dialog_bindings import RUNS
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.session import Session
from cockpit.tui.widgets.footer import FittedFooter
from cockpit.tui.widgets.run_list.table import RunsReader, RunsTable


class RunsScreen(Dialog[NextRun | None]):
    """A dialog with the list of runs. The dialog returns the run to open, or None. `operator`: whether a live run is
    opened as operator; `at`: the folder of the run at the cursor."""

    def __init__(self, session: Session, operator: bool = False, at: Path | None = None) -> None:
        super().__init__()
        self._session, self._operator = session, operator
        self.reader = RunsReader(runs_dir())
        self.table = RunsTable(self.reader, session.folder, self._compared())
        self.table.scroll.key = at
        self._opening = False

    def compose(self) -> ComposeResult:
        yield self.table
        yield FittedFooter()

    def on_mount(self) -> None:
        self.reader.start()
        self.set_focus(self.table)

    def on_unmount(self) -> None:
        self.reader.stop()

    def update_from(self, store: Store) -> None:
        self.table.update_from(store)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_help(self) -> None:
        self.app.push_screen(Help(self.table.TITLE, self.table.HELP, {"Runs": (*RUNS, *LIST)}))

    def action_open(self) -> None:
        """Check in a separate thread that the chosen run can be opened; if so, close this screen and return the run."""
        run = self.table.chosen
        if run is None or self._opening:
            return
        if self.table.is_current(run):
            self.dismiss(None)
            return
        try:
            following = next_run(run)
        except CockpitError as error:
            self._say(str(error))
            return
        self._opening = True
        self._say("opening …")
        self.run_worker(lambda: self._check(following), thread=True)

    def _check(self, following: NextRun) -> None:
        why = ""
        try:
            following.check(self._operator)
        except CockpitError as error:
            why = str(error)
        self.app.call_from_thread(self._checked, following, why)

    def _checked(self, following: NextRun, why: str) -> None:
        self._opening = False
        if not self.is_attached:
            return
        if why:
            self._say(why)
        else:
            self.dismiss(following)

    async def action_compare(self) -> None:
        """Compare the shown run with the marked runs on the curves screen. If no run is marked or compared yet, mark
        the run at the cursor first."""
        comparison, source = self._session.comparison, self._session.source
        chosen = self.table.chosen
        if not self.table.marked and not self._compared() and chosen and not self.table.is_current(chosen):
            self.table.action_mark()
            if not self.table.marked:
                return  # the list shows why this run cannot be compared
        marked = [
            run.folder
            for run in self.reader.found or ()
            if run.folder in self.table.marked and not self.table.is_current(run)
        ]
        before = self._compared()
        if not marked and not before:
            self._say("space marks the runs to compare with")
            return
        if len(marked) > MOST:
            self._say(f"{len(marked)} runs are marked; at most {MOST} can be told apart")
            return
        for folder in before:
            if folder not in marked:
                comparison.remove(folder)
        for folder in marked:
            if folder not in before:
                comparison.add(folder, self._session.store, source.target)
        self.dismiss(None)
        await self.run_action("app.screen('curves')")

    def _compared(self) -> list[Path]:
        """The folders of the runs that the curves screen compares with this run."""
        return [one.folder for one in self._session.comparison.others if one.folder]

    def _say(self, message: str) -> None:
        self.table.message = message
        self.table.redraw()
