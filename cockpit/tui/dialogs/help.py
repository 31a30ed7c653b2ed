"""Help for the focused panel, and a list of all keys."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from cockpit.data.filter import Vocabulary
from cockpit.data.format import clean
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import palette
from cockpit.tui.keys.action import Action, spelled

OVER_SSH = "Over a slow connection, `ssh -C` compresses the output about twentyfold."
FILTERS = (
    "Comparisons = != < <= > >= with + - * /, joined by & | ! ( ); a rank without the value does not match."
)
GLYPHS = "✓ good   ! needs attention   ✗ lost or broken   · no data (not zero)"


class Help(Dialog[None]):
    """A modal page with help text."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,question_mark,f1,q,enter", "dismiss", "close", id="help.close")
    ]

    def __init__(
        self,
        title: str,
        about: str,
        sections: Mapping[str, Sequence[Action]],
        keymap: Mapping[str, str] | None = None,
        filter_names: Vocabulary | None = None,
    ) -> None:
        """`sections`: the actions to list, by heading; `keymap`: the user's keys by action id."""
        super().__init__()
        self._title, self._about, self._sections = title, about, sections
        self._keymap, self._filter_names = keymap or {}, filter_names

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="dialog") as dialog:
            dialog.border_title = f"Help · {self._title}"
            dialog.border_subtitle = "esc closes"
            yield Static(self._page())

    def _page(self) -> Text:
        colours = palette(self.app.theme)
        page = Text(f"{self._about}\n\n{GLYPHS}\n", style=colours.text)
        for name, actions in self._sections.items():
            if not actions:
                continue
            page.append(f"\n{name}\n", colours.accent)
            for action in actions:
                page.append(f"  {spelled(self._keymap.get(action.id, action.keys)):<12}", colours.strong)
                page.append(f"{action.about}\n", colours.dim)
        if self._filter_names:
            self._add_filter_names(page, self._filter_names)
        page.append(f"\n{OVER_SSH}", colours.dim)
        return page

    def _add_filter_names(self, page: Text, names: Vocabulary) -> None:
        colours = palette(self.app.theme)
        page.append("\nFilter (/)\n", colours.accent)
        page.append(f"  {FILTERS}\n", colours.dim)
        for group in (names.numbers, names.texts, names.flags, names.statistics):
            for name, about in group.items():
                page.append(f"  {name:<18}", colours.strong).append(f"{clean(about)}\n", colours.dim)
