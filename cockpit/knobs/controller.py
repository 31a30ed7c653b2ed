"""Controller of the knob board: one method per key.

The controller holds the edits and the preview query; the board only draws them. No method blocks: requests are handed
to the app's data source, which sends them to the run, and their outcome reaches the store later.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from agents.client import whoami
from agents.protocol import CommandState, Decide, KnobState, Propose, Try, Value, spell
from agents.requests import Request
from agents.state.undo import newest_undoable
from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.link import LinkState
from cockpit.data.log.outcomes import reverted_text
from cockpit.data.sources.source import Source, ViewerError, viewer_text
from cockpit.data.store import Store, Topic
from cockpit.knobs import values
from cockpit.knobs.conflict import changes_since, refused_as_stale
from cockpit.knobs.edits import Edits
from cockpit.knobs.preview import PreviewQuery

NOTHING_CHOSEN = "nothing is edited: choose a value with ← → or type one"

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Message:
    """Feedback to the user, shown until the next key press."""

    level: Level
    text: str


def _key(
    method: Callable[Concatenate["BoardController", P], T],
) -> Callable[Concatenate["BoardController", P], T]:
    """Decorator for methods that run on a key press: holds the store's lock, clears the last message, and calls
    `changed`."""

    @wraps(method)
    def run(self: "BoardController", /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.store.lock:
            self._armed_revision, self._undo_revision = self._undo_revision, 0
            self._confirmed_revision, self._conflict_revision = self._conflict_revision, 0
            self.had_message, self.message = self.message is not None, None
            result = method(self, *args, **kwargs)
            self.update()
            self._changed()
        return result

    return run


class BoardController:
    """Holds the user's edits on a knob board, the preview query about them, and the requests that were sent. `changed`
    is called after each key press."""

    def __init__(self, source: Source, store: Store, changed: Callable[[], None] = lambda: None) -> None:
        self.source = source
        self.store = store
        self.edits = Edits()
        self.preview = PreviewQuery(source.ask)
        self.message: Message | None = None
        self.had_message = False  # whether a message was shown when the current key was pressed
        self.request_id = ""  # id of the newest proposal or trial
        self.trial_id = ""  # id of the trial that the board shows
        self.decision: Decide | None = None  # a decision on the trial that the hub has not yet applied
        self.unconfirmed: dict[str, Value] = {}  # a proposal that ends the run, until the user confirms it
        self._changed = changed
        self._undo_revision = 0  # the revision that a second press of the undo key reverts
        self._armed_revision = 0  # `_undo_revision` before the current key was pressed
        # The revision on which a second press of the propose key bases the proposal.
        self._conflict_revision = 0
        self._confirmed_revision = 0  # `_conflict_revision` before the current key was pressed
        self._sent: Propose | None = None  # the newest proposal of edits

    def version(self) -> object:
        """A tuple of all controller state that the board shows, for comparison with the last drawn state; the store is
        not included. The board redraws when this value changes."""
        edits = self.edits
        return (
            (edits.row, edits.typed, tuple(edits.changes.items())),
            (self.message, self.request_id, self.trial_id, self.decision, tuple(self.unconfirmed)),
            (self.preview.status, self.preview.answer and self.preview.answer.id),
        )

    def update(self) -> None:
        """Read the outcomes of requests from the store, and request a preview of the edits. The caller holds the
        store's lock."""
        store, trial = self.store, self.store.trial
        if trial:
            self.trial_id = trial.id
        if self.decision and (self.decision.id in store.denied or not trial or trial.state == "reverting"):
            self.decision = None
        self._take_back()
        self.preview.update(store, self.edits.pending(rows(store)))

    # -------------------------------------------------------------------------------------- editing

    @_key
    def move_cursor(self, by: int) -> None:
        """Move the cursor to another row. A value that the user has typed in the old row is first added to the unsent
        changes; if it is not legal, the cursor stays."""
        if self._accept_typed() and rows(self.store):
            self.edits.row = (self.edits.row + by) % len(rows(self.store))

    @_key
    def select(self, name: str) -> None:
        """Move the cursor to the knob or action `name`, if the run has it."""
        names = [row.name for row in rows(self.store)]
        if name in names and self._accept_typed():
            self.edits.row = names.index(name)

    @_key
    def next_value(self, by: int) -> None:
        """Choose the value `by` places after the current one in the list of legal values."""
        if rows(self.store):
            self.edits.next_value(rows(self.store), by, self._revision)

    @_key
    def type_character(self, character: str) -> None:
        self.edits.type(character)

    def could_type(self, character: str) -> bool:
        """Whether the character continues the typed value or, if none is typed, begins a legal value of the selected
        knob."""
        if self.edits.typed or not rows(self.store):
            return bool(self.edits.typed)
        legal = self.edits.selected(rows(self.store)).legal
        return any(spell(choice).startswith(character) for choice in legal.choices)

    @_key
    def delete_character(self) -> None:
        self.edits.typed = self.edits.typed[:-1]

    @_key
    def discard(self) -> bool:
        """Discard edits, typed text and the message. Return False if there was nothing to discard."""
        return self.edits.discard() or self.had_message

    @_key
    def take_over(self, changes: Mapping[str, Value]) -> None:
        """Turn `changes`, such as the hypothetical values of the what-if panel, into edits, and move the cursor to the
        first edit."""
        here = rows(self.store)
        for knob in here:
            if knob.name in changes:
                self.edits.set(knob, changes[knob.name], self._revision)
        names = [knob.name for knob in here]
        self.edits.row = min((names.index(name) for name in self.edits.changes), default=self.edits.row)

    # ------------------------------------------------------------------------------------ proposing

    @_key
    def propose(self) -> None:
        """Propose the edits or, without edits, the action under the cursor. A change that ends the run needs a
        confirmation."""
        if not (self._may_change() and self._accept_typed()):
            return
        here = rows(self.store)
        if not self.edits.changes and here:
            knob = self.edits.selected(here)
            if (value := values.only_value(knob)) is not None:
                self.edits.set(knob, value, self._revision)
        if self._moved and self._confirmed_revision == self._revision:
            self.edits.base = self._revision
        if not self.edits.changes:
            self._warn(NOTHING_CHOSEN)
        elif self._moved:
            self._warn_of_conflict()
        elif any(knob.ends and knob.name in self.edits.changes for knob in here):
            self.unconfirmed = dict(self.edits.changes)
        else:
            self._propose(self.edits.changes)

    @_key
    def confirm_end(self, save: bool) -> None:
        """Propose the change that ends the run. With `save`, the run also saves a checkpoint at the same step
        boundary."""
        ending, self.unconfirmed = self.unconfirmed, {}
        if ending and self._may_change():
            self._propose({**ending, "save": True} if save else ending)

    @_key
    def cancel_end(self) -> None:
        """Discard the change that would end the run."""
        self.unconfirmed = {}
        self.edits.discard()

    def _propose(self, changes: Mapping[str, Value]) -> None:
        proposal = Propose(_new_id(), dict(changes), self.edits.base, who=whoami())
        if self._send(proposal):
            self._sent = proposal
            self.edits.changes = {}

    @property
    def _moved(self) -> bool:
        """Whether the run has applied another change since the user's first edit."""
        base = self.edits.base
        return bool(self.edits.changes) and base is not None and base < self._revision

    def _warn_of_conflict(self) -> None:
        """Show which other changes were made since the first edit. A second press of the propose key proposes the edits
        anyway.
        """
        self._conflict_revision = self._revision
        between = changes_since(self.store, self.edits.base or 0)
        self._warn(f"{between}; press enter again to propose anyway")

    def _take_back(self) -> None:
        """Turn a proposal back into edits if the hub refused it because another change came first."""
        sent = self._sent
        command = self.store.state.commands.get(sent.id) if sent else None
        if sent is None or command is None or not command.settled:
            return
        if not refused_as_stale(command) or self.edits.changes or self.edits.typed:
            self._sent = None
        elif self._revision > (sent.base_revision or 0):  # otherwise the other change has not arrived yet
            self._sent, self.request_id = None, ""
            self.edits.changes, self.edits.base = dict(sent.changes), sent.base_revision
            self._warn_of_conflict()

    @_key
    def undo(self) -> None:
        """On the first press, name the change that undo would revert; on the second press, revert it."""
        if not self._may_change():
            return
        store = self.store
        newest = newest_undoable(store.state.commands.values())
        if newest is None:
            self._warn("there is no change to undo")
        # true also if another operator made a change between the presses
        elif newest.revision != self._armed_revision:
            self._undo_revision = newest.revision
            ends = ", which ends the trial" if store.trial and newest.id.startswith(store.trial.id) else ""
            text = f"press again to revert revision {newest.revision}: {reverted_text(newest)}{ends}"
            self._warn(text)
        else:
            self._send(Propose(_new_id(), {}, self._revision, who=whoami(), undo=True))

    # --------------------------------------------------------------------------------------- trials

    @_key
    def start_trial(self) -> None:
        """Start a trial of the edited knob. No other knob may have an edit."""
        if not (self._may_change() and self._accept_typed()):
            return
        if why := self._trial_refusal():
            self._warn(why)
            return
        request = Try(_new_id(), dict(self.edits.changes), values.TRIAL_STEPS, whoami())
        if self._send(request):
            self.trial_id = request.id
            self.edits.changes = {}

    def _trial_refusal(self) -> str:
        """Why no trial can start now; "" if a trial can start. If another trial is running or the edited
        knob is an action, the text is the same as in the hub's refusal."""
        edited = [knob for knob in rows(self.store) if knob.name in self.edits.changes]
        if trial := self.store.trial:
            return f"another trial is running, by {format.clean(trial.who) or 'someone'}"
        if not edited:
            return NOTHING_CHOSEN
        if len(edited) > 1:
            return f"a trial changes one knob, and {len(edited)} are edited"
        if edited[0].action:
            return f"{format.clean(edited[0].name)} is an action; only a knob can be tried"
        return ""

    @_key
    def end_trial(self, keep: bool) -> None:
        """End the trial now: keep the value on trial, or revert it."""
        if not self._may_change():
            return
        trial = self.store.trial
        if trial is None:
            self._warn("no trial is running")
        elif trial.state == "reverting":
            self._warn("the trial is already being reverted")
        elif keep and trial.state == "before":
            self._warn("the trial has not changed the knob yet, so there is nothing to keep")
        else:
            decision = Decide(keep, trial.id, whoami())
            if self._send(decision):
                self.decision = decision

    # -------------------------------------------------------------------------------------- helpers

    @property
    def _revision(self) -> int:
        return _board_revision(self.store)

    def _warn(self, text: str) -> None:
        self.message = Message(Level.WARN, text)

    def _may_change(self) -> bool:
        """Whether this cockpit may change the run; if not, set a message with the reason."""
        if run_ended(self.store):
            self._warn("the run is over: no knob can be changed")
        elif not self.source.operator:
            self._warn(viewer_text(self.source))
        else:
            return True
        return False

    def _accept_typed(self) -> bool:
        refusal = self.edits.accept_typed(rows(self.store), self._revision)
        if refusal:
            self._warn(refusal)
        return not refusal

    def _send(self, request: Request) -> bool:
        try:
            self.source.ask(request)
        except ViewerError as error:
            self._warn(str(error))
            return False
        self.request_id = request.id
        return True


def rows(store: Store) -> list[KnobState]:
    """The rows of the board: knobs, then actions."""
    return [*values.value_knobs(store.state.board), *values.actions(store.state.board)]


def run_ended(store: Store) -> bool:
    """Whether the run has ended, with or without a failure."""
    return store.link in (LinkState.ENDED, LinkState.FAILED)


def undoable(store: Store) -> CommandState | None:
    """The newest knob change that an undo can revert."""
    return store.once("undoable", (Topic.BOARD,), lambda: newest_undoable(store.state.commands.values()))


def _board_revision(store: Store) -> int:
    return store.state.board.revision if store.state.board else 0


def _new_id() -> str:
    return uuid.uuid4().hex
