"""A one-line prompt at the bottom of any screen: the text, its effect, and suggestions for the next word."""

from collections.abc import Callable
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.format import clean
from cockpit.data.store import Store
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import Palette, palette
from cockpit.tui.keys.general_bindings import PROMPT_KEYS
from cockpit.tui.navigation import Refused
from cockpit.tui.prompt_lines import Deed, Judged, PromptLine

MOST_CHARACTERS = 500
MOST_KEPT = 32  # maximum number of earlier texts that the arrow keys can show


class Prompt(Dialog[Deed]):
    """A dialog in which the user types one line; its result is the action to run after the dialog closes. `kept`: the
    lines that the user has entered before, newest last. `shown` returns the store whose data the screens show (a frozen
    copy while the screens are frozen)."""

    BINDINGS: ClassVar[list[Binding]] = PROMPT_KEYS  # type: ignore[assignment]

    def __init__(self, line: PromptLine, kept: list[str], shown: Callable[[], Store]) -> None:
        super().__init__()
        self.line = line
        # Kept, because an update may come before they are mounted or after they are removed.
        self._above, self._count = Static(id="hint"), Static(id="count")
        self._kept, self._shown = kept, shown
        # Index in `kept` of the text on the line; the length of `kept` for a new text.
        self._place = len(kept)
        self._judged = Judged()
        self._refused = ""
        self._drawn: tuple[object, ...] = ()
        self._input = Input(line.text, max_length=MOST_CHARACTERS, compact=True, select_on_focus=False)

    def compose(self) -> ComposeResult:
        with Vertical(id="prompt"):
            yield self._above
            with Horizontal(id="line"):
                yield Static(f"{self.line.SIGN} ", id="sign")
                yield self._input
                yield self._count

    def on_mount(self) -> None:
        self.set_focus(self._input)
        self._update()

    def _update(self) -> None:
        with self._shown().lock:
            self.update_from(self._shown())

    def update_from(self, store: Store) -> None:
        """Check the typed text again against the current state of the run. The caller holds the store's lock."""
        if not self.is_mounted:
            return
        self._judged = self.line.judge(store, self._input.value)
        drawn = self._judged, self._refused, self.app.theme, self.size
        if drawn == self._drawn:
            return
        self._drawn = drawn
        colours = palette(self.app.theme)
        self._above.update(self._hint(colours))
        count = f" {clean(self._judged.count)} " if self._judged.count else ""
        self._count.update(Text(count, style=_ink(colours.level[self._judged.level])))

    def _hint(self, colours: Palette) -> Text:
        judged = self._judged
        line = Text(" ", overflow="ellipsis")
        if self._refused or (judged.hint and judged.level is Level.WARN):
            text = f"{Level.WARN.value} {clean(self._refused or judged.hint)}"
            return line.append(text, _ink(colours.level[Level.WARN]))
        line.append(f"enter applies · {self.line.ESCAPE}", _ink(colours.dim))
        if judged.words:
            line.append(" · tab ", _ink(colours.dim)).append(clean(judged.words[0]), _ink(colours.accent))
            line.append(f"  {clean('  '.join(judged.words[1:]))}", _ink(colours.dim))
        if judged.hint:
            line.append(f" · {clean(judged.hint)}", _ink(colours.dim))
        return line

    def on_input_changed(self, event: Input.Changed) -> None:
        self._refused = ""
        self._update()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        text = event.value
        try:
            deed = self.line.enter(text)
        except Refused as error:
            self._refused = str(error)
            self._update()
            return
        if text.strip() and text not in self._kept[-1:]:
            self._kept.append(text)
            del self._kept[:-MOST_KEPT]
        self.dismiss(deed)

    def on_click(self, event: events.Click) -> None:
        """Close the prompt if the click is outside it."""
        if event.widget is self:
            self.action_leave()

    def action_leave(self) -> None:
        self.dismiss(self.line.escape())

    def action_complete(self) -> None:
        """Complete the last word of the text with the first suggestion."""
        word = next(iter(self._judged.words), "")
        text = self._input.value
        if word:
            shared = next(n for n in range(min(len(word), len(text)), -1, -1) if text.endswith(word[:n]))
            self._input.value = text[: len(text) - shared] + word
            self._input.cursor_position = len(self._input.value)

    def action_recall(self, by: int) -> None:
        """Move `by` lines through the lines that the user has entered before, and show the line reached; after the
        newest, show an empty line."""
        self._place = max(0, min(len(self._kept), self._place + by))
        self._input.value = self._kept[self._place] if self._place < len(self._kept) else ""
        self._input.cursor_position = len(self._input.value)


def _ink(style: Style) -> Style:
    """The style without its background, because the prompt has a background of its own."""
    return Style(color=style.color, bold=style.bold)
