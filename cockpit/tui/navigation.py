"""Selects steps, ranks, experts and anomalies, applies filters, and sets marks. Each method that runs on a key press
returns one sentence for the user, or "".
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from cockpit.data import format
from cockpit.data.filter import Filter, FilterError, matching, parse, vocabulary
from cockpit.data.marks import MarkError
from cockpit.data.navigation.anomalies import anomalies, next_anomaly
from cockpit.data.navigation.jump import Jump, JumpError, parse_jump
from cockpit.data.store import Store
from cockpit.tui.session import Session

NO_ANOMALY = "no anomaly: no alert, no outlying rank or expert, no slow step"


class Navigator:
    """Changes the selection (step, rank and expert) of one app. `shown` returns the store that the screens show, which
    is a frozen copy while the screens are frozen. `open` opens a screen by name. In a replay, steps are not selected;
    instead, `seek` moves the playback position to a step (None: to the end of the recording).
    """

    def __init__(
        self,
        session: Session,
        shown: Callable[[], Store],
        open: Callable[[str], object],
        screens: Sequence[str],
        seek: Callable[[int | None], None] | None = None,
    ) -> None:
        self.session = session
        self.shown = shown
        self.screens = screens
        self._open, self._seek = open, seek
        self._anomaly: tuple[object, ...] | None = None  # key of the anomaly that was shown last

    # ----------------------------------------------------------------------------------------------- steps

    def step_by(self, by: int) -> str:
        """Select the step before or after the selected step. A move to the newest step clears the selection, so that
        the screens follow the run again."""
        selection = self.session.selection
        with self.shown().lock:
            store = self.shown()
            steps = [summary.step for summary in store.state.summaries]
            oldest = store.state.curve.first if store.state.curve else steps[0] if steps else None
            newest = store.step
        if newest is None or oldest is None:
            return "no step is done yet"
        now = newest if selection.step is None else selection.step
        if by < 0:
            before = bisect_left(steps, now)
            to = steps[before - 1] if before else now - 1
            if to < oldest:
                return f"step {format.grouped(oldest)} is the oldest step that is kept"
            selection.step = to
            return ""
        after = bisect_right(steps, now)
        following = after >= len(steps) or steps[after] >= newest
        selection.step = None if following else max(now + 1, steps[after]) if after else now + 1
        return ""

    def parse_jump(self, text: str) -> Jump:
        """Parse the target of a jump, such as a step or a rank. Raises JumpError. In a replay, the target may be a step
        after the newest shown step."""
        with self.shown().lock:
            return parse_jump(text, self.shown(), self.screens, any_step=self._seek is not None)

    def go(self, jump: Jump) -> str:
        """Select the step, rank or expert that `jump` names, and open the screen that `jump` names, if any."""
        selection = self.session.selection
        if jump.last or jump.step is not None:
            if self._seek:
                self._seek(jump.step)
            else:
                selection.step = jump.step
        if jump.rank is not None:
            selection.rank = jump.rank
        if jump.layer is not None:
            selection.layer, selection.expert = jump.layer, jump.expert
        if jump.screen:
            self._open(jump.screen)
        return ""

    # ------------------------------------------------------------------------------------------- anomalies

    def anomaly(self, by: int) -> str:
        """Show the next anomaly or, if `by` is negative, the previous one."""
        selection = self.session.selection
        with self.shown().lock:
            store = self.shown()
            found = anomalies(store, selection.metric, matching(store, selection.filter, selection.step))
            chosen = next_anomaly(found, self._anomaly, by)
            hidden = len(anomalies(store, selection.metric)) - len(found)
        if chosen is None:
            return f"none among the ranks of the filter, {hidden} among the others" if hidden else NO_ANOMALY
        at, one = chosen
        self._anomaly = one.key
        if one.step is None and not self._seek:
            selection.step = None  # the anomaly is about the newest steps
        self.go(Jump(one.step, one.rank, one.layer, one.expert, one.screen))
        return f"{one.level.value} {at + 1} of {len(found)} · {one.text}"

    # -------------------------------------------------------------------------------------------- the filter

    def parse_filter(self, text: str) -> Filter | None:
        """Parse a filter; returns None for an empty string. Raises FilterError."""
        with self.shown().lock:
            names = vocabulary(self.shown())
        return parse(text, names) if text.strip() else None

    def filter(self, chosen: Filter | None) -> str:
        """Apply a filter; None removes it."""
        before, self.session.selection.filter = self.session.selection.filter, chosen
        return "the filter is removed" if before and not chosen else ""

    # ------------------------------------------------------------------------------------------------ marks

    def mark(self, text: str) -> str:
        """Mark the selected step, or the newest step if none is selected, with a name and a note. `text`: the name of
        the mark and, after a space, its note. Raises MarkError."""
        name, _, note = text.strip().partition(" ")
        with self.shown().lock:
            store = self.shown()
            step = store.step if self.session.selection.step is None else self.session.selection.step
            if step is None:
                raise MarkError("no step is done yet, so there is no step to mark")
            marks = store.named_marks
            mark = marks.set(name, step, note.strip())
            store.marked()
        return f"mark {mark.text} at step {format.grouped(step)}" + (f" · {marks.note}" if marks.note else "")


Refused = (FilterError, JumpError, MarkError)
"""Errors in a text that the user typed; the message is one sentence."""
