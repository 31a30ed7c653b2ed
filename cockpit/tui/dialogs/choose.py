"""A dialog in which the user chooses one or several rows of a list."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cockpit.data.format import clean
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import Palette, palette


@dataclass(frozen=True)
class Row:
    """One row of a list: its key, its name, and an optional note."""

    key: str
    name: str
    about: str = ""


class Choose(Dialog[list[str] | None]):
    """Returns the keys of the chosen rows, or None if the user cancels. With `several`, the space bar adds a row to
    `chosen` or removes it. If the user has not pressed the space bar, Enter replaces the key `current` in `chosen` with
    the key of the row under the cursor."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,q", "dismiss", "cancel", id="choose.cancel"),
        Binding("space", "mark", "add or remove", id="choose.toggle"),
        Binding("j", "move('down')", show=False, id="choose.down"),
        Binding("K", "move('up')", show=False, id="choose.up"),
    ]

    def __init__(
        self,
        title: str,
        rows: Sequence[Row],
        current: str = "",
        chosen: Collection[str] = (),
        several: bool = False,
    ) -> None:
        super().__init__()
        self._title, self._rows, self._several = title, rows, several
        self._current = current
        self._chosen = list(chosen)
        self._toggled = False

    def compose(self) -> ComposeResult:
        colours = palette(self.app.theme)
        options = OptionList(
            *(Option(self._text(row, colours), id=f"row{n}") for n, row in enumerate(self._rows))
        )
        options.border_title = Content(clean(self._title))
        options.border_subtitle = (
            "enter chooses · space adds or removes" if self._several else "enter chooses"
        )
        options.highlighted = next((n for n, row in enumerate(self._rows) if row.key == self._current), 0)
        yield options

    def _text(self, row: Row, colours: Palette) -> Text:
        name = max((len(row.name) for row in self._rows), default=0)
        mark = "✓ " if row.key in self._chosen else "  "
        text = Text(mark if self._several else "", style=colours.accent)
        text.append(clean(row.name).ljust(name + 2), colours.text)
        return text.append(clean(row.about), colours.dim)

    def action_move(self, way: str) -> None:
        options = self.query_one(OptionList)
        (options.action_cursor_down if way == "down" else options.action_cursor_up)()

    def action_mark(self) -> None:
        options = self.query_one(OptionList)
        if not self._several or options.highlighted is None:
            return
        row = self._rows[options.highlighted]
        self._toggled = True
        if row.key in self._chosen:
            self._chosen.remove(row.key)
        else:
            self._chosen.append(row.key)
        options.replace_option_prompt_at_index(options.highlighted, self._text(row, palette(self.app.theme)))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        key = self._rows[event.option_index].key
        if not self._several:
            self.dismiss([key])
        elif self._toggled:
            self.dismiss(self._chosen)
        else:
            # Enter alone replaces the choice `current`.
            others = [one for one in self._chosen if one != key or one == self._current]
            self.dismiss([key if one == self._current else one for one in others])
