"""Panel with the settings of the run and the paths of its files."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from rich.style import Style
from textual.binding import Binding

from cockpit.data import format
from cockpit.data.run_folders.run_files import RunFiles, read_files
from cockpit.data.run_folders.run_info import Fact, run_info
from cockpit.data.sources.folders import told_folder
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.strips import StripLine, rule
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.dialog_bindings import INFO, INFO_KEYS
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.widgets.log.listing import ListPanel

MOST_LABEL = 28  # columns


class Row(NamedTuple):
    """One row of the list: the heading of a section, or a setting or path with its value (`fact`). A heading is the
    first row of its section; its `fact` is None."""

    section: str
    number: int
    fact: Fact | None


class FilesReader:
    """Reads the run's folder once, in a separate thread, because a network disk may hang."""

    def __init__(self) -> None:
        self.files: RunFiles | None = None
        self.folder: Path | None = None

    def read(self, folder: Path | None) -> None:
        """Start to read `folder` in a separate thread, unless it is the folder that was read last."""
        if folder is not None and folder != self.folder:
            self.folder = folder
            threading.Thread(target=self._read, args=(folder,), name="cockpit-info", daemon=True).start()

    def _read(self, folder: Path) -> None:
        self.files = read_files(folder)


class InfoPanel(ListPanel[Row]):
    """The panel with the settings of the run and the paths of its files, in one list with sections. `target`: the name
    of the run for `cockpit attach`."""

    TOPICS = frozenset({Topic.GRID, Topic.BOARD, Topic.EVENTS})
    TITLE = "Run"
    BINDINGS: ClassVar[list[Binding]] = INFO_KEYS
    ACTIONS = (*INFO, *LIST)
    NEEDS_RUN = False
    HELP = (
        "The settings of the run, the paths of its logs, recording and checkpoints, the changes since its start, and "
        "the command that attaches to it. y copies the text of the line at the cursor to the clipboard, in terminals "
        "that allow it. `·` means that the run does not report the value. `cockpit info` prints the same."
    )

    def __init__(self, folder: Path | None, target: str) -> None:
        super().__init__("info")
        self.wrapped = True
        self._folder, self._target = folder, target
        self._reader = FilesReader()

    def update_from(self, store: Store) -> None:
        self._reader.read(self._folder or told_folder(store))
        super().update_from(store)

    # --------------------------------------------------------------------------------------- items

    def items(self, store: Store) -> Sequence[Row]:
        files = self._reader.files
        rows = store.once(
            "info",
            (Topic.GRID, Topic.BOARD, Topic.EVENTS),
            lambda: _rows(store, files, self._target),
            (files, store.link),
        )
        if self.scroll.key is None and not self._listed and rows:
            self.scroll.key = self.key_of(rows[0])  # start at the top
        text = self.text.casefold()
        return [row for row in rows if row.fact and _matches(row.fact, text)] if text else rows

    def key_of(self, item: Row) -> object:
        return item.section, item.number

    def choice(self) -> object:
        return (super().choice(), self._reader.files is not None, self._store.link)

    def title(self, store: Store) -> str:
        return f"Run · {store.run}"

    def subtitle(self, store: Store) -> str:
        return self.position().replace("newer", "more")

    # ------------------------------------------------------------------------------------- drawing

    def columns(self, item: Row, items: Sequence[Row], width: int, colours: Palette) -> StripLine:
        if item.fact is None:
            return rule(item.section, width, colours.accent, colours.line)
        widest = max(
            (len(row.fact.label) for row in items if row.fact and row.section == item.section), default=0
        )
        label_width = min(widest, MOST_LABEL, max(8, width // 2 - 4)) + 2
        label = (
            item.fact.label
            if len(item.fact.label) < label_width
            else f"{item.fact.label[: label_width - 2]}…"
        )
        return StripLine().add(f"  {label:<{label_width}}", colours.dim)

    def parts(self, item: Row, colours: Palette) -> list[tuple[str, Style]]:
        if item.fact is None:
            return []
        return [(item.fact.text, colours.faint if item.fact.text == format.MISSING else colours.text)]

    # ------------------------------------------------------------------------------------- actions

    def action_copy(self) -> None:
        row = self.chosen
        if row and row.fact:
            text = str(row.fact.plain or "")
            self.app.copy_to_clipboard(text)
            self.app.notify(text, title="Copied", markup=False)


def _rows(store: Store, files: RunFiles | None, target: str) -> list[Row]:
    rows = []
    for section in run_info(store, files, target):
        rows.append(Row(section.title, -1, None))
        rows += [Row(section.title, number, fact) for number, fact in enumerate(section.facts)]
    return rows


def _matches(fact: Fact, text: str) -> bool:
    return text in fact.label.casefold() or text in fact.text.casefold()
