"""The range of steps that curves show: zoom, pan, following the newest step, and full detail for a part of a long run.

For old steps, the state of a run keeps only a few values per bucket of steps (`agents.state.metric_curves`). The detail
of a view contains every step in the view's range; it is read from the recording and set with `set_detail`.
"""

import copy
import math
from collections.abc import Callable

from agents.protocol import Summary
from agents.state.metric_curves import Curve
from agents.state.run_state import RunState

View = tuple[int, int]
"""The first and last visible step."""

MIN_STEPS = 16  # minimum number of steps in a view
# A view with this many buckets needs no detail: there are at least two buckets per column of a wide screen.
FINE = 512


class CurveView:
    """The range of steps that the charts of a run's curves show. `state` returns the state of the run; `changed` is
    called after each change of the view."""

    def __init__(self, state: Callable[[], RunState], changed: Callable[[], None]) -> None:
        self._state, self._changed = state, changed
        self.steps: View | None = None  # None: all steps
        self.follows = False  # whether the view follows the newest step
        self.detail: Curve | None = None  # every step of `steps`, if a recording has them

    def copy(self, state: Callable[[], RunState], changed: Callable[[], None]) -> "CurveView":
        """A copy of this view for another store; `state` returns that store's state of the run."""
        other = CurveView(state, changed)
        other.steps, other.follows, other.detail = self.steps, self.follows, copy.copy(self.detail)
        return other

    def show(self, steps: View | None) -> None:
        """Show a range of steps; None means all steps. A view that ends at the newest step follows the run."""
        whole = extent(self._state())
        self.steps, self.detail = steps, None
        self.follows = steps is not None and whole is not None and steps[1] >= whole[1]
        self._changed()

    def zoom(self, by: float, at: int | None = None) -> None:
        """Scale the number of steps shown; for example, `by` = 2 shows twice as many. `at`: a step that keeps its
        position in the view. If `at` is None, a view that ends at the newest step still ends there, and any other view
        keeps its centre.
        """
        whole = extent(self._state())
        if whole is None:
            return
        first, last = self._shown(whole)
        self.show(clamp(zoom((first, last), by, whole[1] if at is None and last >= whole[1] else at), whole))

    def pan(self, by: float) -> None:
        """Move the view by the fraction `by` of its width."""
        whole = extent(self._state())
        if whole and self.steps:
            self.show(clamp(pan(self._shown(whole), by), whole))

    def _shown(self, whole: View) -> View:
        """The visible range of steps. If the view follows the run, the range ends at the newest step, which may be
        newer than at the last call of `note`.
        """
        if self.steps is None:
            return whole
        ahead = max(0, whole[1] - self.steps[1]) if self.follows else 0
        return self.steps[0] + ahead, self.steps[1] + ahead

    def wanted_detail(self) -> View | None:
        """The range of steps to read from a recording because the run's state has these steps only in wide buckets;
        None if no range is needed."""
        view, curve, detail = self.steps, self._state().curve, self.detail
        if view is None or curve.width == 1 or curve.last is None or view[0] > curve.last:
            return None
        width = view[1] - view[0]
        if width // curve.width >= FINE:
            return None
        # In a view that follows the run, the detail contains more and more steps that are no longer visible, and a
        # longer detail has wider buckets.
        outgrown = detail is not None and detail.width > 1 and (detail.first or 0) < view[0] - width
        return view if detail is None or outgrown else None

    def set_detail(self, view: View, detail: Curve) -> None:
        """Set the values of every step of `view`, read from a recording. The values are ignored if the user has chosen
        another range of steps in the meantime."""
        if self.steps is None:
            return
        if view == self.steps or (self.follows and view[0] <= self.steps[0] <= view[1]):
            newest = detail.last if detail.last is not None else view[0] - 1
            detail.extend(one for one in self._state().summaries if newest < one.step <= self.steps[1])
            self.detail = detail
            self._changed()

    def note(self, newest: Summary) -> None:
        """If the view follows the run, move it to the newest step; add this step to `detail`."""
        step = newest.step
        if self.steps and self.follows and step > self.steps[1]:
            self.steps = self.steps[0] + step - self.steps[1], step
        if self.detail is not None:
            self.detail.cut(step)  # the step was repeated after a resume
            if self.steps and step <= self.steps[1]:
                self.detail.extend([newest])


def extent(state: RunState) -> View | None:
    """The oldest and the newest step that have values."""
    newest = state.summaries[-1].step if state.summaries else state.curve.last
    oldest = state.curve.first if state.curve else state.summaries[0].step if state.summaries else None
    return None if oldest is None or newest is None else (oldest, newest)


def zoom(view: View, by: float, at: int | None = None) -> View:
    """Scale the length of `view`, but to no less than `MIN_STEPS`; for example, `by` = 2 doubles it. The step `at`
    (default: the centre) keeps its relative position in the view.
    """
    first, last = view
    width = max(MIN_STEPS, (last - first) * by)
    at = at if at is not None and first <= at <= last else None
    share = (at - first) / (last - first) if at is not None and last > first else 0.5
    centre = at if at is not None else (first + last) / 2
    return max(0, math.floor(centre - share * width)), math.ceil(centre + (1 - share) * width)


def pan(view: View, by: float) -> View:
    """The range `view`, moved to later steps. `by`: the distance as a fraction of the view's width, negative for
    earlier steps. The moved view does not start before step 0."""
    move = max(-view[0], round((view[1] - view[0]) * by))
    return view[0] + move, view[1] + move


def clamp(view: View, whole: View) -> View | None:
    """The range `view`, moved into the range `whole` of all steps; None if `view` is at least as long as `whole`."""
    first, last = view
    if last - first >= whole[1] - whole[0]:
        return None
    move = max(0, whole[0] - first) - max(0, last - whole[1])
    return first + move, last + move
