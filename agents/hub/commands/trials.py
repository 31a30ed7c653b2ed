"""A trial sets one or more knobs to other values for some steps, compares these steps with those before, and reverts
the values unless an operator keeps them, or the steps became clearly faster and no tried knob affects the loss.

The hub runs the trial and stores it in its journal, so the trial completes even if the client that started it
disconnects. A restarted hub continues the trial. The changes of a trial go through `Control` like any proposal. Each
change has its own id, so that no change is applied twice.

    before -> applying -> after -> kept
                                -> reverting -> reverted

A trial that cannot continue ends in the state `failed`. A trial that an operator ends before it has changed anything
ends in the state `reverted`.
"""

import time
from collections.abc import Callable

from msgspec import structs

from agents.alerts.finding import step_of
from agents.hub.commands.confidence import typical
from agents.hub.commands.control import Control
from agents.hub.commands.journal import Journal
from agents.hub.commands.trial_rules import check_request, judged, mean_loss
from agents.hub.commands.trial_window import Measured, Window
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import (
    Changes,
    CommandState,
    Decide,
    Event,
    Propose,
    TrialState,
    Try,
    clip,
    spell,
)
from agents.recording.commands import TrialEntry

# Maximum time for measuring the steps before the change, and as long for those after it: this many times the expected
# time, and at least LEAST_S.
MOST_TIMES, LEAST_S = 4, 600.0
# Maximum number of steps until the change takes effect: this many times the measured steps, and at least LEAST_STEPS.
APPLY_TIMES, LEAST_STEPS = 10, 100
TICK_S = 1.0  # a longer time between two ticks does not count, because the hub was suspended
REVERT_RETRY_S = 5.0  # interval between attempts to revert if the journal cannot be written


class Trials:
    """The trials of one run; only one trial runs at a time."""

    def __init__(self, update_log: UpdateLog, control: Control, journal: Journal) -> None:
        self._update_log, self._control, self._journal = update_log, control, journal
        self._entry: TrialEntry | None = None  # the running trial
        self._decided: Decide | None = None  # a decision that arrived while the change was being applied
        self._window = Window()
        self._stage = ""  # the stage that the trial is in
        self._stage_s = 0.0  # seconds spent in the stage
        self._ticked_s = 0.0
        self.load_journal()

    def load_journal(self) -> None:
        """Load the trials that the journal has read from disk. Called again when the journal file is opened after an
        earlier failure."""
        for entry in self._journal.found.trials:
            self._update_log.publish(entry.state)
            if not entry.state.settled:
                self._entry = entry

    def start(self, ask: Try) -> None:
        """Start a trial. The answer to the client is a TrialState, which is published to all subscribers."""
        known = self._update_log.state.trials.get(ask.id)
        if known:
            self._update_log.publish(known)
            return
        under_way = self._entry.state if self._entry else None
        knobs, why = check_request(ask, self._update_log.state.board, under_way, self._journal.failure)
        now = time.time()
        state = TrialState(
            id=ask.id,
            state="failed" if why else "before",
            changes=ask.changes,
            before={knob.name: knob.value for knob in knobs},
            steps=ask.steps,
            who=ask.who,
            time_s=now,
            loss_neutral=bool(knobs) and all(knob.loss_neutral for knob in knobs),
            began_s=now,
            reason=ask.reason,
            why=clip(why),
        )
        if why:
            self._update_log.publish(state)  # no knob was changed, so the trial need not be in the journal
            return
        self._decided = None
        self._store(TrialEntry(state))

    def decide(self, decide: Decide) -> None:
        """End the running trial, because an operator decided to keep or revert its values."""
        entry = self._entry
        if entry is None or (decide.id and decide.id != entry.state.id):
            return
        who = decide.who or "someone"
        match entry.state.state:
            case "before":
                self._settle("reverted", f"ended by {who} before anything was changed")
            case "applying":
                self._decided = decide
            case "after":
                self._decide_by_hand(entry, decide)

    def tick(self) -> None:
        """Collect the step times measured so far, and move the trial to its next state if enough steps have been
        measured, or if the change or its reversal has been applied."""
        entry = self._entry
        if entry is None:
            return
        if self._control.ended is not None:
            self.run_ended()
            return
        try:
            _STAGES[entry.state.state](self, entry)
            self._end_overdue()
        except Exception as error:  # noqa: BLE001 - an error ends this trial, not the hub
            self._give_up(entry, f"{type(error).__name__}: {error}")

    def _end_overdue(self) -> None:
        """End a trial whose steps cannot be measured in time, for example because the run is paused, so that other
        trials can start."""
        now, entry = time.monotonic(), self._entry
        passed_s, self._ticked_s = min(now - self._ticked_s, TICK_S), now
        stage = f"{entry.state.id} {entry.state.state}" if entry else ""
        self._stage_s = self._stage_s + passed_s if stage == self._stage else 0.0
        self._stage = stage
        if entry is None or entry.state.state not in ("before", "after"):
            return
        step_s = (self._update_log.state.step_ms or 0.0) / 1000
        limit_s = max(LEAST_S, MOST_TIMES * entry.state.steps * step_s)
        if self._stage_s < limit_s:
            return
        why = (
            f"only {entry.state.measured} of {entry.state.steps} steps could be measured in a row within "
            f"{limit_s:.0f} s"
        )
        if entry.state.state == "before":
            self._settle("failed", why)
        else:
            self._revert(entry, why)

    def run_ended(self) -> None:
        """End the trial as failed after the ranks have ended, because nothing more can be measured or reverted."""
        if self._entry:
            self._settle("failed", f"the run ended before the trial was decided{self._control.ended or ''}")

    # ------------------------------------------------------------------------------------------ the stages

    def _before(self, entry: TrialEntry) -> None:
        state = entry.state
        if any(self._values.get(knob, was) != was for knob, was in state.before.items()):
            self._settle("failed", "another change was made before the trial began")
            return
        steps = self._measured({})
        if len(steps) >= state.steps:
            window = steps[-state.steps :]
            times = [step.step_ms for step in window]
            state = self._transition(
                state,
                "applying",
                before_ms=typical(times),
                loss_before=mean_loss(window),
            )
            # Written to the journal before the proposal, so that each tried value belongs to a trial in the journal.
            self._store(TrialEntry(state, times, self._others(state)))
            self._propose_change(state)
        elif len(steps) != state.measured:
            self._publish_progress(structs.replace(state, measured=len(steps)))

    def _propose_change(self, state: TrialState) -> None:
        until = step_of(self._update_log.state) + max(LEAST_STEPS, APPLY_TIMES * state.steps)
        reason = f"trial {state.id}"
        self._control.propose(Propose(_try_id(state), state.changes, None, until, state.who, reason))

    def _applying(self, entry: TrialEntry) -> None:
        state, command = entry.state, self._command_state(_try_id(entry.state))
        if command is None:
            # The hub was killed between the two writes; propose the change again with the same id.
            self._propose_change(state)
        elif command.state == "applied":
            self._store(
                structs.replace(entry, state=self._transition(state, "after", revision=command.revision))
            )
            if self._decided and self._entry:
                self._decide_by_hand(self._entry, self._decided)
        elif command.state != "accepted":
            self._settle("failed", command.why)

    def _after(self, entry: TrialEntry) -> None:
        state = entry.state
        values = self._values
        changed = next((knob for knob, to in state.changes.items() if values and values.get(knob) != to), "")
        command = self._command_state(_try_id(state))
        if command and command.state == "rolled_back":
            self._settle("failed", command.why)
        elif changed:
            why = f"{changed} was changed by an operator during its trial"
            if self._still_tried(state):
                self._revert(entry, why)
            else:
                self._settle("failed", why)
        elif values and self._others(state) != entry.others:
            self._revert(
                entry, "another knob was changed during the trial, so the two measurements cannot be compared"
            )
        else:
            steps = self._measured(state.changes)
            if len(steps) >= state.steps:
                self._judge(entry, steps[: state.steps])
            elif len(steps) != state.measured:
                self._publish_progress(structs.replace(state, measured=len(steps)))

    def _reverting(self, entry: TrialEntry) -> None:
        state, command = entry.state, self._command_state(_revert_id(entry))
        if command is None:
            self._propose_revert(entry)
        elif command.state == "applied":
            self._settle("reverted", state.why)
        # A new id is needed, because an id always gets the same answer.
        elif self._control.unwritten(command.id):
            if time.time() - command.time_s >= REVERT_RETRY_S:
                self._store(structs.replace(entry, attempts=entry.attempts + 1))
        elif command.state != "accepted":
            self._settle("failed", f"it could not be reverted: {command.why}")
            self._log_error(
                f"trial {state.id} could not be reverted; {_assignments(state)} stays in force: {command.why}"
            )

    # ------------------------------------------------------------------------------------------ the outcome

    def _judge(self, entry: TrialEntry, window: list[Measured]) -> None:
        entry, why_not = judged(entry, window)
        if why_not:
            self._revert(entry, why_not)
        else:
            self._store(
                structs.replace(
                    entry, state=self._transition(entry.state, "kept", why="it is clearly faster")
                )
            )

    def _decide_by_hand(self, entry: TrialEntry, decide: Decide) -> None:
        who = decide.who or "someone"
        if decide.keep:
            self._store(
                structs.replace(entry, state=self._transition(entry.state, "kept", why=f"kept by {who}"))
            )
        else:
            self._revert(entry, f"ended by {who}")

    def _revert(self, entry: TrialEntry, why: str) -> None:
        entry = structs.replace(entry, state=self._transition(entry.state, "reverting", why))
        self._store(entry)
        self._propose_revert(entry)

    def _propose_revert(self, entry: TrialEntry) -> None:
        if not self._control.ready:
            return  # the next tick tries again; without ranks the proposal would be rejected
        state = entry.state
        reason = clip(f"trial {state.id}: {state.why}")
        back = Propose(_revert_id(entry), self._still_tried(state), who=state.who, reason=reason)
        self._control.propose(back, undoes=state.revision)

    def _settle(self, to: str, why: str) -> None:
        if self._entry:
            self._store(structs.replace(self._entry, state=self._transition(self._entry.state, to, why=why)))

    def _give_up(self, entry: TrialEntry, error: str) -> None:
        """End the trial after an unexpected error; revert the tried value if possible."""
        state = entry.state
        self._log_error(f"trial {state.id} cannot continue: {error}")
        if state.state == "after":
            self._revert(entry, "the measurement failed")
        else:
            self._settle("failed", f"it cannot continue: {error}")

    # ---------------------------------------------------------------------------------------------- queries

    @property
    def _values(self) -> Changes:
        board = self._update_log.state.board
        return {knob.name: knob.value for knob in board.knobs if not knob.action} if board else {}

    def _still_tried(self, state: TrialState) -> Changes:
        """For each knob that still has the value under trial, its value before the trial. An operator may have changed
        some of the trial's knobs in the meantime; these are omitted."""
        values = self._values
        return {
            knob: was for knob, was in state.before.items() if values.get(knob, was) == state.changes[knob]
        }

    def _others(self, state: TrialState) -> Changes:
        return {name: value for name, value in self._values.items() if name not in state.changes}

    def _measured(self, changes: Changes) -> list[Measured]:
        """The newest consecutive steps that ran with the current values, without the first steps after the switch to
        these values.
        """
        return self._window.follow(self._update_log.state.summaries, {**self._values, **changes})

    def _command_state(self, id: str) -> CommandState | None:
        return self._update_log.state.commands.get(id)

    # ------------------------------------------------------------------------------------------- publishing

    def _transition(self, state: TrialState, to: str, why: str | None = None, **facts: object) -> TrialState:
        why = state.why if why is None else clip(why)
        measured = 0 if to == "after" else state.measured
        return structs.replace(state, state=to, time_s=time.time(), measured=measured, why=why, **facts)

    def _store(self, entry: TrialEntry) -> None:
        self._entry = None if entry.state.settled else entry
        self._update_log.publish(entry.state)
        self._journal.put_trial(entry)

    def _log_error(self, text: str) -> None:
        self._update_log.publish(Event(time.time(), "error", "hub", clip(text)))

    def _publish_progress(self, state: TrialState) -> None:
        """Publish the trial's progress without writing it to the journal."""
        assert self._entry is not None
        self._entry = structs.replace(self._entry, state=state)
        self._update_log.publish(state)


_STAGES: dict[str, Callable[[Trials, TrialEntry], None]] = {
    "before": Trials._before,
    "applying": Trials._applying,
    "after": Trials._after,
    "reverting": Trials._reverting,
}


def _try_id(state: TrialState) -> str:
    return f"{state.id}.try"


def _revert_id(entry: TrialEntry) -> str:
    return f"{entry.state.id}.revert{entry.attempts}"


def _assignments(state: TrialState) -> str:
    return ", ".join(f"{name}={spell(value)}" for name, value in state.changes.items())
