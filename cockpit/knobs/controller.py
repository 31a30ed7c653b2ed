"""What a person does at the knob board, and what they are told: each deed of a key. Textual-free.

Nothing here waits: what is asked goes to the feed, and the store tells later what became of it.
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from agents.client import whoami
from agents.protocol import CommandState, Decide, KnobState, Propose, Try, Value
from agents.requests import Request
from agents.state.undo import newest_undoable
from cockpit.data import format
from cockpit.data.diagnosis import Level
from cockpit.data.outcomes import taken_back
from cockpit.data.sources.source import Source, ViewerError, viewer_text
from cockpit.data.store import LinkState, Store, Topic
from cockpit.knobs import values
from cockpit.knobs.edits import Edits
from cockpit.knobs.preview import PreviewQuery

CHOOSE = "nothing is marked: choose a value with ← → or type one"


@dataclass(frozen=True)
class Said:
    """A word to the person, until they do something else."""

    level: Level
    text: str


class BoardController:
    """One board's marks, question, and what was asked of the run. All deeds are called with the store's lock held."""

    def __init__(self, feed: Source) -> None:
        self.feed = feed
        self.marks = Edits()
        self.asking = PreviewQuery(feed.ask)
        self.said: Said | None = None
        self.sent = ""  # the id of the newest proposal or trial
        self.watched = ""  # the id of the trial that is shown
        self.word: Decide | None = None  # on the trial, under way to the hub
        self.ending: dict[str, Value] = {}  # proposed, but it ends the run: to be confirmed
        self._armed = 0  # the revision that one more press takes back

    def state(self) -> object:
        """All that what is drawn depends on, beside the store."""
        marks = self.marks
        return (
            (marks.row, marks.typed, tuple(marks.values.items())),
            (self.said, self.sent, self.watched, self.word, tuple(self.ending)),
            (self.asking.word, self.asking.answer and self.asking.answer.id),
        )

    def look(self, store: Store) -> None:
        """Note what became of what was asked, and ask what the marked changes would do."""
        trial = store.trial
        if trial:
            self.watched = trial.id
        if self.word and (self.word.id in store.denied or not trial or trial.state == "reverting"):
            self.word = None
        self.asking.look(store, self.marks.meant(rows(store)))

    # ------------------------------------------------------------------------------------- choosing

    def move(self, store: Store, by: int) -> None:
        self._begin()
        if self._take(store) and rows(store):
            self.marks.row = (self.marks.row + by) % len(rows(store))

    def turn(self, store: Store, by: int) -> None:
        self._begin()
        if rows(store):
            self.marks.turn(rows(store), by, _revision(store))

    def type(self, store: Store, letter: str) -> None:
        self._begin()
        self.marks.type(letter)

    def rub_out(self, store: Store) -> None:
        self._begin()
        self.marks.typed = self.marks.typed[:-1]

    def drop(self, store: Store) -> bool:
        """Forget what is typed, marked or said; False if there was nothing."""
        had = self.marks.drop() or self.said is not None
        self._begin()
        return had

    # --------------------------------------------------------------------------------------- asking

    def propose(self, store: Store) -> None:
        self._begin()
        if not (self._may(store) and self._take(store)):
            return
        if not self.marks.values and rows(store):
            knob = self.marks.chosen(rows(store))
            if (do := values.only(knob)) is not None:
                self.marks.mark(knob, do, _revision(store))
        if not self.marks.values:
            self._say(CHOOSE)
        elif any(knob.ends and knob.name in self.marks.values for knob in rows(store)):
            self.ending = dict(self.marks.values)
        else:
            self._propose(self.marks.values)

    def end(self, store: Store, save: bool) -> None:
        """Propose what ends the run, which is confirmed now; `save`: with a checkpoint at the same step boundary."""
        ending, self.ending = self.ending, {}
        if ending and self._may(store):
            self._propose({**ending, "save": True} if save else ending)

    def stay(self, store: Store) -> None:
        """Do not end the run after all."""
        self.ending = {}
        self.marks.drop()

    def _propose(self, changes: Mapping[str, Value]) -> None:
        if self._send(Propose(_new(), dict(changes), self.marks.base, who=whoami())):
            self.marks.taken()

    def try_out(self, store: Store) -> None:
        """Try the one marked knob."""
        self._begin()
        if not (self._may(store) and self._take(store)):
            return
        if why := self._untriable(store):
            self._say(why)
            return
        ask = Try(_new(), dict(self.marks.values), values.TRIAL_STEPS, whoami())
        if self._send(ask):
            self.watched = ask.id
            self.marks.taken()

    def _untriable(self, store: Store) -> str:
        """Why there is nothing that could be tried now, as the hub would say it."""
        marked = [knob for knob in rows(store) if knob.name in self.marks.values]
        if trial := store.trial:
            return f"another trial is under way, by {format.clean(trial.who) or 'someone'}"
        if not marked:
            return CHOOSE
        if len(marked) > 1:
            return f"a trial is of one knob, and {len(marked)} are marked"
        if marked[0].action:
            return f"{format.clean(marked[0].name)} is an action, done once, and cannot be tried"
        return ""

    def decide(self, store: Store, keep: bool) -> None:
        """Keep what is tried, or end the trial now."""
        self._begin()
        if not self._may(store):
            return
        trial = store.trial
        if trial is None:
            self._say("no trial is under way")
        elif trial.state == "reverting":
            self._say("the trial is being taken back already")
        elif keep and trial.state == "before":
            self._say("nothing is turned yet, so there is nothing to keep")
        else:
            word = Decide(keep, trial.id, whoami())
            if self._send(word):
                self.word = word

    def undo(self, store: Store) -> None:
        """Say what would be taken back; asked again, take it back."""
        armed = self._armed
        self._begin()
        if not self._may(store):
            return
        found = newest_undoable(store.state.commands.values())
        if found is None:
            self._say("there is no change to undo")
        elif found.revision != armed:  # somebody may have been faster between the two
            self._armed = found.revision
            ends = ", which ends the trial" if store.trial and found.id.startswith(store.trial.id) else ""
            self._say(f"press it again to take back revision {found.revision}: {taken_back(found)}{ends}")
        else:
            self._send(Propose(_new(), {}, _revision(store), who=whoami(), undo=True))

    # -------------------------------------------------------------------------------------- machinery

    def _begin(self) -> None:
        """Of every deed: what was said before is over."""
        self.said, self._armed = None, 0

    def _say(self, text: str) -> None:
        self.said = Said(Level.WARN, text)

    def _may(self, store: Store) -> bool:
        """Whether anything can be asked of the run from here; if not, it is said why."""
        if over(store):
            self._say("the run is over: nothing can be changed any more")
        elif not self.feed.operator:
            self._say(viewer_text(self.feed))
        else:
            return True
        return False

    def _take(self, store: Store) -> bool:
        refusal = self.marks.take(rows(store), _revision(store))
        if refusal:
            self._say(refusal)
        return not refusal

    def _send(self, asked: Request) -> bool:
        try:
            self.feed.ask(asked)
        except ViewerError as error:
            self._say(str(error))
            return False
        self.sent = asked.id
        return True


def rows(store: Store) -> list[KnobState]:
    """What the cursor goes through: the knobs, then the actions."""
    return [*values.held(store.state.board), *values.actions(store.state.board)]


def over(store: Store) -> bool:
    """Whether the run has ended, well or not."""
    return store.link in (LinkState.ENDED, LinkState.FAILED)


def undoable(store: Store) -> CommandState | None:
    """The change that an undo would take back."""
    return store.once("undoable", (Topic.BOARD,), lambda: newest_undoable(store.state.commands.values()))


def _revision(store: Store) -> int:
    return store.state.board.revision if store.state.board else 0


def _new() -> str:
    return uuid.uuid4().hex
