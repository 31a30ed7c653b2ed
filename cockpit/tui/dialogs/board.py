"""The knob board as a modal screen: each key calls one method of the board controller."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from cockpit.data.sources.source import Source
from cockpit.data.store import Store
from cockpit.knobs.controller import BoardController
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.dialogs.ending import Answer, Ending
from cockpit.tui.dialogs.help import Help
from cockpit.tui.keys.dialog_bindings import BOARD, BOARD_KEYS
from cockpit.tui.widgets.board.panel import KnobTable
from cockpit.tui.widgets.footer import FittedFooter

TRIAL_ACTIONS = {"decide"}  # shown only while a trial is running


class BoardScreen(Dialog[None]):
    """Screen on which the user edits, previews, proposes, tries and undoes knob values."""

    BINDINGS: ClassVar[list[Binding]] = BOARD_KEYS  # type: ignore[assignment]

    def __init__(self, source: Source, store: Store) -> None:
        super().__init__()
        self.controller = BoardController(source, store, lambda: self.table.update_from(store))
        self.table = KnobTable(self.controller)
        self._trial_running = False
        self._offered = [action for action in BOARD if source.operator or not action.operator]

    def compose(self) -> ComposeResult:
        yield self.table
        yield FittedFooter(without={action.id for action in BOARD} - {action.id for action in self._offered})

    def update_from(self, store: Store) -> None:
        self.controller.update()
        self.table.update_from(store)
        if self._trial_running != (store.trial is not None):
            self._trial_running = not self._trial_running
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Show the keys that keep or revert a trial in the footer only while a trial is running."""
        return self._trial_running or action not in TRIAL_ACTIONS

    def on_key(self, event: events.Key) -> None:
        if event.key == "backspace":
            self.controller.delete_character()
        elif self._is_undo(event.key):
            return  # the key's binding runs
        elif event.character and event.character.isprintable() and event.character not in " ?":
            self.controller.type_character(event.character)
        else:
            return
        event.stop()

    def _is_undo(self, key: str) -> bool:
        """Whether the letter `key` means undo and cannot be part of a typed value."""
        return key in self._bindings.key_to_bindings and not self.controller.could_type(key)

    def action_move(self, by: int) -> None:
        self.controller.move_cursor(by)

    def action_turn(self, by: int) -> None:
        self.controller.next_value(by)

    def action_propose(self) -> None:
        self.controller.propose()
        if self.controller.unconfirmed:
            self.app.push_screen(Ending(), self._end)

    def _end(self, answer: Answer | None) -> None:
        if answer in ("save", "end"):
            self.controller.confirm_end(answer == "save")
        else:
            self.controller.cancel_end()

    def action_try(self) -> None:
        self.controller.start_trial()

    def action_decide(self, keep: bool) -> None:
        self.controller.end_trial(keep)

    def action_undo(self) -> None:
        self.controller.undo()

    def action_help(self) -> None:
        self.app.push_screen(Help(self.table.TITLE, self.table.HELP, {self.table.TITLE: self._offered}))

    def action_close(self) -> None:
        if not self.controller.discard():
            self.dismiss()
