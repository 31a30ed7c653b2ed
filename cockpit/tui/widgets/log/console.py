"""Panel with the console output of the run, read from the files in its folder."""

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from textual.binding import Binding

from agents.rundir.runs import HUB_LOG
from cockpit.data import format
from cockpit.data.run_folders.console import FILES, Console, Line, Tail
from cockpit.data.sources.engine_process import LOG
from cockpit.data.sources.folders import told_folder
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.theme import Palette
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.keys.screen_bindings import CONSOLE, CONSOLE_KEYS
from cockpit.tui.widgets.log.listing import ListPanel


class ConsolePanel(ListPanel[Line]):
    """The newest lines of one output file of the run."""

    TOPICS = frozenset({Topic.GRID})
    TITLE = "Console output"
    BINDINGS: ClassVar[list[Binding]] = CONSOLE_KEYS
    ACTIONS = (*CONSOLE, *LIST)
    EVERY = 2
    HELP = (
        "The output of the run, from the files in its folder: `engine.log`, `hub.log` and, after a failure, "
        "`failure.txt`; o shows the next file. The newest lines are read as they are written, without colours and "
        "control codes. Only the end of a large file is read; the lower border shows how much of the file precedes "
        "it. The files are readable only on the machine, or the shared disk, that has the run's folder."
    )

    def __init__(self, console: Console) -> None:
        super().__init__("console")
        self._output = console
        self._shown: tuple[Tail | None, Sequence[Line]] = (None, ())  # the file and its lines on the screen
        self._found: tuple[object, Sequence[Line]] = (None, ())  # the lines that match the search

    def update_from(self, store: Store) -> None:
        if self.is_on_screen:
            self._output.folder = self._output.folder or told_folder(store)
            frozen = store.frozen_s is not None
            tail, (shown, lines) = self._output.tail, self._shown
            if not frozen or tail is None:
                self._output.look()
            if tail and not (frozen and tail is shown and lines):
                self._shown = tail, tail.lines
        super().update_from(store)

    def choice(self) -> object:
        return (super().choice(), self._output.revision)

    # --------------------------------------------------------------------------------------- items

    def items(self, store: Store) -> Sequence[Line]:
        _, lines = self._shown
        if not self.text:
            return lines
        version = (id(lines), self.text)
        if self._found[0] != version:
            text = self.text.casefold()
            self._found = version, [line for line in lines if text in line.text.casefold()]
        return self._found[1]

    def key_of(self, item: Line) -> object:
        return item.number

    def place_of(self, key: object, items: Sequence[Line]) -> int | None:
        """The index of the line with this number, or of the first later line."""
        assert isinstance(key, int)
        low, high = 0, len(items)
        while low < high:
            middle = (low + high) // 2
            if items[middle].number < key:
                low = middle + 1
            else:
                high = middle
        return min(low, len(items) - 1) if items else None

    # ------------------------------------------------------------------------------------- drawing

    def title(self, store: Store) -> str:
        tail, files = self._output.tail, self._output.files
        if tail is None:
            return self.TITLE
        place = (
            f" ({files.index(tail.path) + 1} of {len(files)})"
            if len(files) > 1 and tail.path in files
            else ""
        )
        return f"Console output · {tail.path.name}{place}"

    def subtitle(self, store: Store) -> str:
        tail = self._output.tail
        if tail is None:
            return ""
        if tail.problem:
            return tail.problem
        earlier = f"{format.si(tail.unread_bytes)}B before not read" if tail.unread_bytes else ""
        return " · ".join(part for part in (self.position(), earlier, str(tail.path)) if part)

    def empty_text(self, store: Store) -> str:
        console = self._output
        if console.folder is None:
            return not_here(store)
        if console.tail is None:
            if not console.read_once:
                return "reading …"
            return f"{console.folder} has none of {', '.join(FILES)}: the training loop prints elsewhere"
        if console.tail.problem:
            return console.tail.problem
        return super().empty_text(store) if self.text else f"{console.tail.path.name} is empty"

    def parts(self, item: Line, colours: Palette) -> list[tuple[str, Style]]:
        if not self.text:
            return [(item.text, colours.text)]
        parts, at = [], 0
        lower, text = item.text.casefold(), self.text.casefold()
        if len(lower) != len(item.text):  # case folding changed the length, so positions in both texts differ
            return [(item.text, colours.text)]
        while (found := lower.find(text, at)) >= 0:
            parts += [
                (item.text[at:found], colours.text),
                (item.text[found : found + len(text)], colours.accent),
            ]
            at = found + len(text)
        return [*parts, (item.text[at:], colours.text)]

    # ------------------------------------------------------------------------------------- actions

    def action_file(self) -> None:
        self._output.next_file()
        self.scroll.newest()
        self.redraw()


def not_here(store: Store) -> str:
    """The text for a run whose output cannot be read because its folder is not on this machine."""
    hello = next(iter(store.state.hellos.values()), None)
    host = format.clean(hello.host) if hello else "its machine"
    folder = store.fact("folder")
    where = (
        f"{format.clean(folder)}/{LOG}"
        if isinstance(folder, str)
        else f"{LOG} and {HUB_LOG} in the run's folder"
    )
    return f"the run's folder is not on this machine; on {host}: tail -f {where}"
