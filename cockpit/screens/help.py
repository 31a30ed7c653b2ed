"""Help for what has the focus, and every key."""

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from cockpit.actions import BOARD, OVERVIEW, Action, spelled
from cockpit.theme import palette

OVER_SSH = "Over a slow line, `ssh -C` shrinks the stream some twenty times."
GLYPHS = "✓ well   ! look here   ✗ lost or broken   · no data (never zero)"


class Help(ModalScreen[None]):
    """A page of text; any of its keys closes it."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("escape,question_mark,f1,q,enter", "dismiss", "close", id="help.close")
    ]

    def __init__(self, title: str, about: str, own: tuple[Action, ...], anywhere: tuple[Action, ...]) -> None:
        super().__init__()
        self._title, self._about, self._own, self._anywhere = title, about, own, anywhere

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="dialog") as dialog:
            dialog.border_title = f"Help · {self._title}"
            dialog.border_subtitle = "esc closes"
            yield Static(self._page())

    def _page(self) -> Text:
        colours = palette(self.app.theme)
        page = Text(f"{self._about}\n\n{GLYPHS}\n", style=colours.text)
        sections: tuple[tuple[str, tuple[Action, ...]], ...] = (
            (self._title, self._own),
            ("Panels", OVERVIEW),
            ("Anywhere", self._anywhere),
            # Where the board cannot be opened its keys mean nothing.
            ("Knob board", BOARD if any(action.id == "app.knobs" for action in self._anywhere) else ()),
        )
        for name, actions in sections:
            if not actions:
                continue
            page.append(f"\n{name}\n", colours.accent)
            for action in actions:
                page.append(f"  {spelled(action.keys):<12}", colours.strong)
                page.append(f"{action.about}\n", colours.dim)
        page.append(f"\n{OVER_SSH}", colours.dim)
        return page
