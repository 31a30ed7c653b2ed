"""`cockpit autopilot`: tries advised changes one at a time within the operator's bounds, and stops at an unexpected
event, such as a lost rank or an alert.

The autopilot connects to the hub like any other client, and runs in the foreground. The autopilot makes each change as
a trial (`cockpit try`), and gives a reason, which is recorded in the run's log. The hub measures the steps of the trial
and decides whether the change is kept.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from agents.protocol import Changes, TrialState
from agents.waiting import RunOverError, check_hub, wait_for_command, wait_for_trial
from cockpit.cli.exit_status import DONE, FAILED, INTERRUPTED, REFUSED, SURPRISED
from cockpit.cli.steer.advise import find_advice, ranked_plain
from cockpit.cli.steer.steering import request, steering
from cockpit.data import plain
from cockpit.data.log.outcomes import trial_text
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.knobs.autopilot import Bounds, Watch, loss_kept, nothing_left, outside, parse_bounds, reason
from cockpit.knobs.values import fit, legal_text, value_knobs
from cockpit.printing import complain, print_json, print_line, run_mark
from engine.planner.advice import Advice, Ranked

REVERT_S = 60.0  # maximum wait until a change is reverted or applied
LATEST_HZ = 2.0  # how often the newest records of ranks are received
POLL_S = 0.25
MOST = 64  # maximum number of changes that are previewed at once


class SurpriseError(Exception):
    """Raised at an event that the autopilot did not expect, such as a lost rank, another operator's change or a failed
    trial; the message is one sentence."""


@dataclass
class Options:
    """The options of the command `cockpit autopilot`."""

    within: Sequence[str]
    steps: int
    gain: float  # percent
    most_changes: int
    allow_loss: Sequence[str] = ()
    undecided: bool = False  # whether changes are tried that may make steps slower
    as_json: bool = False


@dataclass
class Autopilot:
    """One session of the autopilot. `moves` is the number of trials started so far, and `kept` is the number of changes
    that were kept after their trial."""

    connection: Connection
    options: Options
    bounds: Bounds
    watch: Watch
    moves: int = 0
    kept: int = 0
    trial: str = ""  # id of the running trial
    tried: list[Changes] = field(default_factory=list)

    def run(self) -> int:
        """Try changes until no remaining change has a large enough predicted gain, or until `most_changes` are kept.
        Raises SurpriseError.
        """
        while self.kept < self.options.most_changes:
            self._check()
            undecided: list[Ranked] = []
            for changes in self._untried():
                advice = find_advice(self.connection, changes)
                if advice.why_not:
                    return self._stop(REFUSED, advice.why_not)
                worthwhile = [one for one in advice.ranked if 100 * one.likely >= self.options.gain]
                if best := next(
                    (one for one in worthwhile if self.options.undecided or not one.undecided), None
                ):
                    self._move(best, advice)
                    break
                undecided = undecided or worthwhile
            else:
                return self._stop(DONE, nothing_left(self.options.gain, undecided))
        return self._stop(DONE, f"changes kept: {self.kept}, the maximum allowed")

    def _untried(self) -> Iterator[list[Changes]]:
        """The changes that were not tried yet, in batches of at most `MOST`, because the leader computes a preview for
        each. Two knobs are changed at once only if no change of one knob is left. For instance, a recompute mode may
        fit into memory only with more micro-batches."""
        board = self.connection.store.state.board
        for changes in (self.bounds.changes(board), self.bounds.pairs(board)):
            untried = [one for one in changes if one not in self.tried]
            for first in range(0, max(1, len(untried)), MOST):
                yield untried[first : first + MOST]

    def _check(self) -> None:
        self.connection.poll(0.0)
        if surprise := self.watch.surprise(self.connection.client.state):
            raise SurpriseError(surprise)

    def _move(self, best: Ranked, advice: Advice) -> None:
        client, changes = self.connection.client, best.candidate.changes
        why = reason(best, advice.bottleneck.sentence if advice.bottleneck else "")
        self.trial = os.urandom(8).hex()
        self.watch.own(self.trial)
        self.moves += 1
        self.tried.append(changes)
        self._report("move", f"try {best.candidate.words} · {why}", **ranked_plain(best))
        request(lambda: client.start_trial(changes, self.options.steps, reason=why, id=self.trial))
        trial = self._watched()
        self.trial = ""
        self._report("outcome", trial_text(trial), trial=plain.plain(trial))
        if trial.state == "failed":
            raise SurpriseError(f"the trial failed: {trial.why}")
        if trial.state == "kept" or self._keep_by_hand(trial):
            self.kept += 1
            # Changes that were no faster with the old knob values may be faster with the new ones.
            self.tried.clear()
        if surprise := outside(trial, best.candidate):
            raise SurpriseError(surprise)

    def _watched(self) -> TrialState:
        """Wait until the trial is settled, and return it. Each of the following reverts the trial and raises
        SurpriseError: a lost rank, a new alert, and a knob change by somebody else."""
        while True:
            state = self.connection.client.state
            trial: TrialState | None = state.trials.get(self.trial)
            if trial and trial.settled:
                return trial
            self.connection.poll(POLL_S)
            check_hub(self.connection.client)
            if self.trial in self.connection.client.denied:
                raise SurpriseError(self.connection.client.denied[self.trial])
            if surprise := self.watch.surprise(self.connection.client.state):
                self.take_back()
                raise SurpriseError(surprise)

    def take_back(self) -> None:
        """End the running trial, if there is one, and restore the old value."""
        client, trial = self.connection.client, self.trial
        self.trial = ""
        known = client.state.trials.get(trial)
        if not trial or (known and known.settled):
            return
        # Also decided if the trial is not known here yet: the hub gets the request for the trial before the decision.
        client.decide(trial, keep=False)
        self._report("outcome", trial_text(wait_for_trial(client, trial, REVERT_S)))

    def _keep_by_hand(self, trial: TrialState) -> bool:
        """After the trial of a change that affects the loss, propose the change again if the 95 % confidence interval
        of the step-time ratio lies below 1 and the mean loss increased by at most 2 %. The hub always reverts the trial
        of such a change, because step time alone cannot justify the change."""
        if trial.loss_neutral or trial.high is None or trial.high >= 1 or trial.state != "reverted":
            return False
        if not loss_kept(trial):
            return False
        client, id = self.connection.client, os.urandom(8).hex()
        self.watch.own(id)
        why = f"autopilot: clearly faster in a trial, loss {trial.loss_before:.4g} → {trial.loss_after:.4g}"
        client.propose(trial.changes, id=id, reason=why)
        command = wait_for_command(client, id, REVERT_S)
        if command.state != "applied":
            raise SurpriseError(f"the change was {command.state}: {command.why}")
        return True

    def _stop(self, status: int, why: str) -> int:
        if status == DONE:
            self._report("stop", why, exit=status)
        else:
            self._report("stop", why, exit=status, sign="✗")
        return status

    def surprised(self, why: str) -> int:
        return self._stop(SURPRISED, f"stopped at an unexpected event: {why}")

    def _report(self, event: str, text: str, sign: str = "·", **more: Any) -> None:
        if self.options.as_json:
            record = {"event": event, "text": text, "moves": self.moves, "kept": self.kept, **more}
            print_json(plain.answer(record, self.connection.store))
        else:
            print_line(f"{sign} {text}")


def fly(run: str | None, options: Options) -> int:
    """Run the autopilot until it stops; returns the exit status."""
    try:
        bounds = parse_bounds(options.within)
    except ValueError as error:
        raise CockpitError(str(error)) from None
    with steering(run) as connection:
        _check_bounds(connection, bounds, options.allow_loss)
        connection.client.set_subscription(LATEST_HZ)  # so that it keeps up with a run of many ranks
        if not options.as_json:
            print_line(run_mark(connection.store).removeprefix(" · "))
        autopilot = Autopilot(connection, options, bounds, Watch(connection.client.state))
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            return _until_stopped(autopilot)
        except (TimeoutError, RunOverError) as error:
            complain(f"{error}{run_mark(connection.store)}")
            return FAILED
        finally:
            signal.signal(signal.SIGTERM, previous)


def _until_stopped(autopilot: Autopilot) -> int:
    try:
        return autopilot.run()
    except SurpriseError as error:
        return autopilot.surprised(str(error))
    except KeyboardInterrupt:
        autopilot.take_back()
        return INTERRUPTED


def _check_bounds(connection: Connection, bounds: Bounds, allow_loss: Sequence[str]) -> None:
    """Raise CockpitError if a bound names an unknown knob, lists an illegal value or allows no legal value, if a
    bounded knob changes the loss but is not in `allow_loss`, or if a knob in `allow_loss` has no bound.
    """
    knobs = {knob.name: knob for knob in value_knobs(connection.store.state.board)}
    for name in sorted({*bounds.names, *allow_loss}):
        if name not in knobs:
            raise CockpitError(f"there is no knob {name}; the knobs are {', '.join(knobs)}")
    if unbounded := sorted({*allow_loss} - bounds.names):
        raise CockpitError(
            f"--allow-loss {unbounded[0]} has no effect; bound {unbounded[0]} in --within as well"
        )
    for name in sorted(bounds.names):
        knob = knobs[name]
        if not knob.loss_neutral and name not in allow_loss:
            raise CockpitError(f"{name} changes the loss; allow it with --allow-loss {name}")
        for value in bounds.values.get(name, ()):
            if why := knob.refusal(fit(knob, value)):
                raise CockpitError(why)
        if not bounds.legal(knob):
            raise CockpitError(f"the bounds of {name} contain no legal value; legal: {legal_text(knob)}")
