"""Confirmation before a run is ended: shows how many steps would be lost, and offers to save a checkpoint first unless
the run saves one at its end."""

from typing import ClassVar, Literal

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Static

from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.store import Store
from cockpit.knobs.ending import can_save, unsaved_steps_text
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import palette
from cockpit.tui.keys.action import spelled
from cockpit.tui.keys.dialog_bindings import ENDING, ENDING_KEYS

Answer = Literal["save", "end", "stay"]


class Ending(Dialog[Answer]):
    """A dialog that asks whether to save and end the run, to end it, or to stay. `again`: the keys that opened the
    dialog; pressing them again ends the run."""

    BINDINGS: ClassVar[list[Binding]] = ENDING_KEYS  # type: ignore[assignment]

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self._again = again
        self.page = Text()
        self._saves = False
        self._question = Static(id="question")

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "End the run?"
            yield self._question

    def on_mount(self) -> None:
        for key in filter(None, self._again.split(",")):
            self._bindings.bind(key, "end", show=False)

    def update_from(self, store: Store) -> None:
        """Show how many steps are in no checkpoint yet and would be lost. The run continues while the dialog is open,
        so this number grows."""
        if not self.is_mounted:
            return
        self._saves = can_save(store)
        colours = palette(self.app.theme)
        page = Text(f"{Level.WARN.value} ", style=colours.level[Level.WARN])
        page.append(f"{unsaved_steps_text(store)}\n\n", colours.text)
        for action in ENDING:
            if action.id == "ending.save" and not self._saves:
                continue
            again = f",{self._again}".rstrip(",") if action.id == "ending.end" else ""
            page.append(f"  {spelled(action.keys + again):<12}", colours.strong)
            page.append(f"{action.about}\n", colours.dim)
        page.rstrip()
        if page != self.page:
            self.page = page
            self._question.update(page)

    def action_save(self) -> None:
        if self._saves:
            self.dismiss("save")

    def action_end(self) -> None:
        self.dismiss("end")

    def action_stay(self) -> None:
        self.dismiss("stay")
