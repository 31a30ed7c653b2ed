"""The state of the plan screen's what-if analysis: hypothetical values of settings, and the planner's predictions for
them. Nothing is sent to the run; a worker thread computes the predictions."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.protocol import KnobState, Value
from cockpit.data.diagnosis.evidence import evidence
from cockpit.data.store import Store
from cockpit.knobs.advice import legal_changes, refuted
from cockpit.knobs.edits import same
from cockpit.knobs.plan import run as runs
from cockpit.knobs.plan.settings import BY_NAME, SETTINGS, Setting, legal_values
from cockpit.knobs.plan.worker import Answer, Worker
from cockpit.knobs.values import value_knobs
from engine.config.layout import Layout
from engine.config.refusal import RefusedError

if TYPE_CHECKING:
    from cockpit.knobs.plan.outlook import Outlook, Planner

REFIT_S = 10.0  # the planner is fitted to new steps at most this often, so that numbers do not flicker
MODES = ("recompute", "zero")  # settings for which the memory panel lists every value


@dataclass(frozen=True)
class Alternative:
    """One value of a setting, with the planner's predictions for the run at this value, or the reason why the value is
    not legal."""

    setting: str
    value: Value
    outlook: "Outlook | None"
    refusal: str = ""


class WhatIf:
    """The user's hypothetical changes to the settings of a run, and what the planner predicts for the run after these
    changes. Callers hold the store's lock."""

    def __init__(self, folder: Path | None = None) -> None:
        self.worker = Worker()
        self.changes: dict[str, Value] = {}
        self.row = 0
        self._folder = folder
        self._early: list[tuple[str, int]] = []  # keys pressed while the layout is being read
        self._reported: runs.Reported | None = None
        self._measured = runs.Measured()
        self._measured_at: float | None = None
        self._version = 0  # version of the measurements
        # the planner of the newest question; only the worker reads it
        self._planner: tuple[object, Planner] | None = None

    def version(self) -> object:
        """A value that changes whenever the selected row, the hypothetical values, the measurements or the planner's
        answers change. Panels then redraw."""
        return self.worker.version, self.row, tuple(self.changes.items()), self._version

    # -------------------------------------------------------------------------------------------- asking

    def update(self, store: Store) -> None:
        """Copy from the store the data that the planner needs."""
        reported = runs.reported(store, self._folder)
        if reported != self._reported:
            self._reported, self._measured_at = reported, None
            self._drop_taken_over()
        now = store.clock()
        due = self._measured_at is None or now - self._measured_at >= REFIT_S
        if due and reported is not None and (measured := runs.measured(store)) != self._measured:
            self._measured, self._version = measured, self._version + 1
        if due:
            self._measured_at = now
        self._replay_early()

    def _drop_taken_over(self) -> None:
        """Remove hypothetical values that are now in force."""
        values = dict(self._reported.values) if self._reported else {}
        for name in [
            name for name in self.changes if name in values and same(values[name], self.changes[name])
        ]:
            del self.changes[name]

    def _basis(self) -> Answer | None:
        reported = self._reported
        return self.worker.ask(("basis", reported), lambda: runs.basis(reported)) if reported else None

    def layout(self) -> Layout | Answer | None:
        """The layout with the values in force, or an Answer that says why there is no layout; None while the layout is
        being read.
        """
        answer = self._basis()
        if answer is None or answer.refusal:
            return answer
        basis: runs.Basis = answer.value
        return basis.layout

    def basis(self) -> runs.Basis | None:
        """The layout and the hardware of the run; None until both are known."""
        answer = self._basis()
        return answer.value if answer and not answer.refusal else None

    def _ask(
        self, what: tuple[Any, ...], compute: "Callable[[Planner], Any]", later: bool = False
    ) -> Answer | None:
        """The result of `compute` for the knob values in force, cached under the key `what`."""
        basis, reported, measured = self.basis(), self._reported, self._measured
        if basis is None or reported is None:
            return None

        def answer() -> Any:
            from cockpit.knobs.plan.outlook import Planner

            made = (reported, measured)
            if self._planner is None or self._planner[0] != made:
                self._planner = made, Planner(reported, basis, measured)
            return compute(self._planner[1])

        return self.worker.ask((reported, *what), answer, self._version, later)

    def outlook(self, changes: dict[str, Value]) -> Answer | None:
        """The planner's predictions for the run after `changes` (an `Outlook`), or for the unchanged run if `changes`
        is empty."""
        changes = dict(changes)
        return self._ask(("outlook", *changes.items()), lambda planner: planner.outlook(changes))

    def alternatives(self) -> Answer | None:
        """The planner's predictions for each recompute mode and each ZeRO stage that the run could have (`MODES`)."""
        return self._ask(("alternatives",), lambda planner: list(_alternatives(planner)), later=True)

    def suggestions(self, store: Store) -> Answer | None:
        """The changes to a single setting that would make steps faster, as `Suggestions`."""
        knobs = value_knobs(store.state.board)
        live = legal_changes(store)
        measured = evidence(store)
        tried = refuted(store.state.trials.values(), {knob.name: knob.value for knob in knobs})

        def compute(planner: "Planner") -> Any:
            from cockpit.knobs.plan.suggestions import suggestions

            return suggestions(planner, measured, live, tried)

        return self._ask(("suggestions", len(store.state.trials)), compute, later=True)

    def chart(self, kind: str) -> Answer | None:
        """The predictions that a chart shows for the run with the user's hypothetical changes. `kind`: "roofline" for
        the communication roofline, "strong" or "weak" for a scaling curve."""
        changes = dict(self.changes)

        def compute(planner: "Planner") -> Any:
            from cockpit.knobs.plan.suggestions import levels, scaled

            outlook = planner.outlook(changes)
            if planner.reported.shared:
                raise RefusedError(outlook.why)
            if kind == "roofline":
                return levels(planner, outlook)
            return scaled(planner, outlook, "strong" if kind == "strong" else "weak")

        return self._ask((kind, *changes.items()), compute)

    # ----------------------------------------------------------------------------------------- changing

    def rows(self) -> list[Setting]:
        """The settings that the what-if panel lists: those that apply to the run's layout."""
        layout = self.layout()
        if not isinstance(layout, Layout):
            return []
        return [one for one in SETTINGS if one.applies(layout)]

    @property
    def setting(self) -> Setting | None:
        """The setting under the cursor."""
        rows = self.rows()
        return rows[min(self.row, len(rows) - 1)] if rows else None

    def _is_early(self, what: str, by: int) -> bool:
        """Whether the layout is still being read. In this case, the key press is stored, to be handled later."""
        if self.layout() is not None:
            return False
        self._early.append((what, by))
        return True

    def _replay_early(self) -> None:
        """Handle the keys that were pressed before the layout was known."""
        if self._early and self.layout() is not None:
            early, self._early = self._early, []
            for what, by in early:
                (self.move if what == "move" else self.turn)(by)

    def move(self, by: int) -> None:
        """Move the cursor."""
        if self._is_early("move", by):
            return
        if rows := self.rows():
            self.row = (min(self.row, len(rows) - 1) + by) % len(rows)

    def values(self, setting: Setting) -> list[Value]:
        """The legal values of a setting, given the user's hypothetical values of the other settings."""
        layout = self.layout()
        return legal_values(layout, self.changes, setting) if isinstance(layout, Layout) else []

    def value(self, setting: Setting) -> tuple[Value, Value]:
        """The current value of a setting, and its hypothetical value."""
        layout = self.layout()
        now = setting.get(layout) if isinstance(layout, Layout) else None
        return now, self.changes.get(setting.name, now)

    def turn(self, by: int) -> None:
        """Set the hypothetical value of the setting under the cursor to another legal value. `by`: the distance in the
        list of legal values, negative for an earlier value."""
        if self._is_early("turn", by):
            return
        setting = self.setting
        if setting is None:
            return
        legal = self.values(setting)
        now, chosen = self.value(setting)
        at = next((n for n, value in enumerate(legal) if same(value, chosen)), None)
        value = legal[0 if at is None else max(0, min(len(legal) - 1, at + by))]
        self.changes.pop(setting.name, None)
        if not same(value, now):
            self.changes[setting.name] = value

    def reset(self) -> None:
        """Set all settings of the what-if panel back to the run's own values."""
        self.changes.clear()
        self._early.clear()

    def live(self, store: Store) -> dict[str, Value]:
        """Those of the user's hypothetical values that can be applied to the running job now: the run has a knob of the
        setting's name, and the value is legal for the knob."""
        knobs = {knob.name: knob for knob in value_knobs(store.state.board)}
        return {
            name: value
            for name, value in self.changes.items()
            if name in knobs and knobs[name].legal.admits(value)
        }


def live_knob(store: Store, setting: Setting) -> KnobState | None:
    """The knob of the running job that has the setting's name; None if there is no such knob."""
    return next((knob for knob in value_knobs(store.state.board) if knob.name == setting.name), None)


def _alternatives(planner: "Planner") -> Iterable[Alternative]:
    for name in MODES:
        setting = BY_NAME[name]
        now = setting.get(planner.basis.layout)
        for value in setting.values(planner.basis.layout):
            try:
                yield Alternative(name, value, planner.outlook({} if same(value, now) else {name: value}))
            except RefusedError as refusal:
                yield Alternative(name, value, None, str(refusal))
