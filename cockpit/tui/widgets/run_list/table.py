"""Panel with the runs of a folder: a table in which the user can mark runs for a comparison, and details of the run at
the cursor."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.style import Style
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.diagnosis.status import SIMULATED
from cockpit.data.run_folders.run_list import (
    LEVELS,
    ListedRun,
    RunLister,
    RunStatus,
    age_text,
    loss_text,
    size_text,
    steps_text,
)
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.dialog_bindings import RUNS, RUNS_KEYS
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.widgets.log.entries import clock
from cockpit.tui.widgets.log.listing import ListPanel, wrap

POLL_S = 2.0
MARK = "●"


class Column(NamedTuple):
    """A column of the table: its heading, its width, and the minimum panel width at which it is shown."""

    heading: str
    width: int
    from_width: int = 0


# The columns after the state. The name gets the remaining width.
COLUMNS = (
    Column("steps", 15),
    Column("loss", 9),
    Column("age", 8),
    Column("ranks", 7, 90),
    Column("size", 10, 100),
    Column("host", 14, 116),
)
STATE = 12
HOW = {"live": "enter attaches to it", "replay": "enter plays its recording", "": "it has nothing to show"}


class RunsReader:
    """Reads the list of runs repeatedly in a separate thread, because a network disk may be slow."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self.found: list[ListedRun] | None = None  # None: not read yet
        self.problem = ""
        self.revision = 0
        self.read_s = 0.0  # time of the last read
        self._lister = RunLister(runs_dir)
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="cockpit-runs", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def read(self) -> None:
        """Read the list of runs once; if that fails, set `problem` to the reason."""
        try:
            self.found, self.problem = self._lister.runs(), ""
        except FileNotFoundError:
            self.found, self.problem = [], f"there is no folder {self.runs_dir.absolute()}"
        except OSError as error:
            self.found, self.problem = [], f"{self.runs_dir} cannot be read: {error.strerror}"
        except Exception as error:  # noqa: BLE001 - else the thread ends, and the list waits forever
            why = f"{type(error).__name__}: {error}"
            self.found, self.problem = self.found or [], f"an internal error stopped the reading: {why}"
        self.read_s = time.time()
        self.revision += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            self.read()
            self._stop.wait(POLL_S)


class RunsTable(ListPanel[ListedRun]):
    """The table of runs: first the live runs, the one that started last on top; then the others, the one with the
    newest data on top. `current`: the folder of the run that this cockpit shows."""

    TITLE = "Runs"
    BINDINGS: ClassVar[list[Binding]] = RUNS_KEYS
    ACTIONS = (*RUNS, *LIST)
    DETAILS = True
    NEEDS_RUN = False
    HELP = (
        "The runs of the runs folder (COCKPIT_RUNS, else ./runs), live ones first. enter attaches to a live run, or "
        "plays the recording of any other run. If this would end a run that the cockpit started, the cockpit asks "
        "first. space marks runs, and c compares the run on the screen with the marked ones. `hub dead` means that the "
        "hub was killed; the ranks may still train. `recorded` means that the recording has no end."
    )

    def __init__(self, reader: RunsReader, current: Path | None, compared: Sequence[Path]) -> None:
        super().__init__("runs")
        self.marked: set[Path] = set(compared)
        self.message = ""  # why the last key did nothing, or what is in progress
        self._reader, self._current = reader, current

    # --------------------------------------------------------------------------------------- items

    def items(self, store: Store) -> Sequence[ListedRun]:
        found = self._reader.found or []
        if found and self.scroll.key is None and not self._listed:
            self.scroll.key = found[0].folder  # start at the top
        text = self.text.casefold()
        return [run for run in found if not text or _matches(run, text)]

    def key_of(self, item: ListedRun) -> object:
        return item.folder

    def choice(self) -> object:
        return (super().choice(), self._reader.revision, frozenset(self.marked), self.message)

    def is_current(self, run: ListedRun) -> bool:
        """Whether this cockpit shows the run."""
        return self._current is not None and run.folder.absolute() == self._current.absolute()

    def title(self, store: Store) -> str:
        return f"Runs · {self._reader.runs_dir}"

    def subtitle(self, store: Store) -> str:
        marked = f"{len(self.marked)} marked" if self.marked else ""
        found = self._reader.found
        total = "" if found is None else format.counted(len(found), "run")
        return " · ".join(part for part in (marked, total) if part)

    def empty_text(self, store: Store) -> str:
        if self._reader.found is None:
            return "reading the folder …"
        if self.text and self._reader.found:
            return super().empty_text(store)
        return self._reader.problem or "no runs yet · start one with: cockpit demo"

    # ------------------------------------------------------------------------------------- drawing

    def draw(self, store: Store, width: int, height: int, colours: Palette) -> list[StripLine]:
        heading = StripLine().add(" " * 3 + f"{'state':<{STATE + 2}}", colours.dim)
        heading.add("run".ljust(_name_width(width - 1)), colours.dim)
        for column in _columns(width - 1):
            heading.add(column.heading.rjust(column.width), colours.dim)
        return [heading, *super().draw(store, width, height - 1, colours)]

    def columns(self, item: ListedRun, items: Sequence[ListedRun], width: int, colours: Palette) -> StripLine:
        level = LEVELS[item.status]
        line = StripLine().add(f"{MARK if item.folder in self.marked else ' '} ", colours.accent)
        line.add(f"{level.value} ", colours.level[level])
        line.add(f"{item.status.value:<{STATE}}", colours.level[level])
        name_width = _name_width(width)
        style = colours.strong if self.is_current(item) else colours.text
        mark = f" {SIMULATED}" if item.simulated else ""
        name = StripLine().add(_clipped(item.shown, name_width - len(mark) - 1), style)
        name.add(mark, colours.level[Level.WARN])
        line.extend(name.pad_to(name_width, colours.text))
        now_s = self._reader.read_s
        cells = {
            "steps": steps_text(item),
            "loss": loss_text(item),
            "age": age_text(item, now_s),
            "ranks": format.grouped(item.ranks),
            "size": size_text(item),
            "host": item.host or format.MISSING,
        }
        for column in _columns(width):
            text = _clipped(cells[column.heading], column.width - 1)
            line.add(text.rjust(column.width), colours.dim if text == format.MISSING else colours.text)
        return line

    def parts(self, item: ListedRun, colours: Palette) -> list[tuple[str, Style]]:
        return []

    def details(
        self, item: ListedRun, store: Store, width: int, height: int, colours: Palette
    ) -> list[StripLine]:
        lines = [rule(item.shown, width, colours.text, colours.line)]
        how = "it is on the screen" if self.is_current(item) else HOW[item.shows]
        hint = [(self.message or how, colours.accent if item.shows or self.message else colours.dim)]
        lines += [StripLine().add("  ", colours.text).extend(line) for line in wrap(hint, max(8, width - 2))]
        rows = [("why", item.why)] if item.why else []
        rows.append(("folder", str(item.folder.absolute())))
        if item.name and item.name != item.shown:
            rows.append(("name", item.name))
        if item.began_s is not None:
            rows.append(("began", clock(item.began_s, dated=True)))
        if item.status is RunStatus.ELSEWHERE:
            rows.append(("host", item.host))
        for label, text in rows:
            for number, line in enumerate(wrap([(text, colours.text)], max(8, width - 10))):
                label_text = "" if number else label
                lines.append(StripLine().add(f"  {label_text:<8}", colours.dim).extend(line))
        return lines

    # ------------------------------------------------------------------------------------- actions

    def action_mark(self) -> None:
        run = self.chosen
        if run is None:
            return
        if not run.shows:
            self.message = f"{run.shown} has no recording to compare with"
        elif run.status is RunStatus.ELSEWHERE:
            self.message = (
                f"the recording of {run.shown} can be read only on {run.host}, until the run has ended"
            )
        elif run.folder in self.marked:
            self.marked.discard(run.folder)
        else:
            self.marked.add(run.folder)
        self.redraw()

    def action_move(self, by: int) -> None:
        self.message = ""
        super().action_move(by)


def _matches(run: ListedRun, text: str) -> bool:
    words = (run.shown, run.name, run.status.value, run.host, SIMULATED if run.simulated else "")
    return any(text in word.casefold() for word in words)


def _columns(width: int) -> list[Column]:
    return [column for column in COLUMNS if width >= column.from_width]


def _name_width(width: int) -> int:
    return max(12, width - 4 - STATE - sum(column.width for column in _columns(width)))


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}…"
