"""Help for the focused panel, and a list of all keys."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from cockpit.tui.keys import Action, spelled
from cockpit.tui.theme import palette

OVER_SSH = "Over a slow connection, `ssh -C` compresses the output about twentyfold."
GLYPHS = "✓ good   ! needs attention   ✗ lost or broken   · no data (not zero)"


class Help(ModalScreen[None]):
    """A modal page with help text."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,question_mark,f1,q,enter", "dismiss", "close", id="help.close")
    ]

    def __init__(self, title: str, about: str, sections: Mapping[str, Sequence[Action]]) -> None:
        """`sections`: the actions to list, by heading."""
        super().__init__()
        self._title, self._about, self._sections = title, about, sections

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
                page.append(f"  {spelled(action.keys):<12}", colours.strong)
                page.append(f"{action.about}\n", colours.dim)
        page.append(f"\n{OVER_SSH}", colours.dim)
        return page
