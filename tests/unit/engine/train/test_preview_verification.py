"""Previews on a simulated cluster, where the true effects are known: signs, intervals, memory, and the events that
compare a preview with the measured effect."""

import pytest

from agents.protocol import Changes, Estimate, Value
from agents.state.preview_checks import checks_of, trust
from engine.control.preview.previewer import Previewer
from engine.control.preview.verification import CHECKED_STEPS, PRIOR_ERROR, SETTLING, Verification
from engine.planner.hardware.table import hardware
from engine.planner.memory.plan import plan_memory
from engine.simulate.simulator import Simulated
from tests.unit.engine.simulate.simulated import Run, small

STEPS = 14  # steps after each change, enough for settling and for the check


class Flight:
    """A simulated run whose previewer has a hardware description that differs from the simulated machine."""

    def __init__(self, *overrides: str, believed: str = "A100-80", scenario: str = "") -> None:
        self.run = Run(small(*overrides), scenario)
        self.previewer = Previewer(self.run.layout, self.run.steering.board, False, hardware(believed))
        self.steps()

    def steps(self, count: int = STEPS) -> list[Simulated]:
        found = []
        for _ in range(count):
            one = self.run.step()
            clock = self.run.simulator.clock.predicted(one.job).clock
            spans = zip(one.times.ends, one.times.starts, strict=True)
            durations = [(end - start).tolist() for end, start in spans]
            piped = self.run.layout.grid.pp > 1
            self.previewer.note_rank(
                int(self.run.simulator.memory(one.job)[0]), clock, durations if piped else None
            )
            self.previewer.note(one.summary, one.routed.load.tolist() if one.routed else ())
            found.append(one)
        return found

    def preview(self, changes: Changes) -> dict[str, Estimate]:
        return {one.quantity: one for one in self.previewer(changes).estimates}

    def change(self, **changes: Value) -> list[Simulated]:
        self.run.change(**changes)  # type: ignore[arg-type]
        return self.steps()


def mean_ms(found: list[Simulated]) -> float:
    return sum(one.summary.step_ms for one in found[SETTLING:]) / len(found[SETTLING:])


CHANGES: list[Changes] = [
    {"recompute": "full"},
    {"recompute": "selective"},
    {"micro_batches": 16},
    {"micro_batches": 4},
    {"schedule": "gpipe"},
    {"zero": 1},
    {"micro_batches": 16, "recompute": "full"},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_the_sign_of_a_preview_is_right_where_the_effect_exceeds_noise(changes: Changes) -> None:
    flight = Flight()
    estimate = flight.preview(changes)["step_ms"]
    assert estimate.now and estimate.interval
    low, high = estimate.interval
    after = mean_ms(flight.change(**changes))
    if abs(after / estimate.now - 1) > 0.02:
        assert ((low + high) / 2 > estimate.now) == (after > estimate.now)
    assert low <= after <= high


def test_memory_is_that_of_the_closed_form() -> None:
    flight = Flight()
    job = flight.run.simulator.job
    before = plan_memory(job)
    peak = flight.preview({"recompute": "full"})["peak_bytes"]
    own = flight.preview({"recompute": "full"})["memory_bytes"]
    found = flight.change(recompute="full")[-1]
    after = plan_memory(found.job)
    assert peak.now == pytest.approx(before.peak, rel=0.01) and peak.after == pytest.approx(
        after.peak, rel=0.01
    )
    assert own.after == pytest.approx(float(flight.run.simulator.memory(found.job)[0]), rel=0.01)


def test_what_does_not_fit_says_so() -> None:
    flight = Flight("model.seq_len=65536", "knobs.recompute=full", "model.layers=64")
    peak = flight.preview({"recompute": "none"})["peak_bytes"]
    assert peak.source.startswith("closed form: does not fit: ") and "pipeline rank" in peak.source


def test_each_change_is_checked_and_the_checks_are_in_an_event() -> None:
    flight = Flight()
    flight.change(recompute="full")
    (event,) = flight.previewer.take_events()
    assert "recompute none→full" in event.text and event.facts["revision"] == 1
    checks = {one.quantity: one for one in checks_of(event)}
    assert checks["step_ms"].inside and checks["step_ms"].measured > checks["step_ms"].now
    assert trust([event])["step_ms"].hits == 1
    assert not flight.previewer.take_events()


def test_a_preview_that_failed_is_told_too() -> None:
    slow = f'[[events]]\nkind = "straggler"\nstep = {STEPS}\nrank = 3\nfactor = 4.0'
    flight = Flight(scenario=slow)
    flight.change(recompute="full")
    (event,) = flight.previewer.take_events()
    check = next(one for one in checks_of(event) if one.quantity == "step_ms")
    assert not check.inside and "step_ms" in event.text and "NOT in" in event.text
    assert flight.previewer._verification.error_of_change("step_ms") > PRIOR_ERROR


def test_a_change_that_is_undone_at_once_is_not_checked() -> None:
    flight = Flight()
    flight.run.change(recompute="full")
    flight.steps(SETTLING + 1)
    flight.run.change(recompute="none")
    flight.steps(SETTLING + 1)
    assert not flight.previewer.take_events()


def test_previews_that_come_true_narrow_the_next_interval() -> None:
    verification = Verification()
    for revision in range(8):
        estimate = Estimate("step_ms", 100.0, 130.0, 110.0, 150.0)
        verification.begin(revision, {"recompute": ("none", "full")}, [estimate])
        for _ in range(SETTLING + CHECKED_STEPS):
            verification.note({"step_ms": 131.0})
    assert verification.error_of_change("step_ms") < 0.7 * PRIOR_ERROR
    assert len(verification.events) == 8


def test_an_estimate_without_a_change_is_no_hit() -> None:
    verification = Verification()
    verification.begin(1, {}, [Estimate("a2a_bytes", 5.0, 5.0), Estimate("step_ms", 5.0)])
    for _ in range(SETTLING + CHECKED_STEPS):
        verification.note({"a2a_bytes": 5.0, "step_ms": 5.0})
    assert not verification.events


@pytest.mark.parametrize(("now", "then"), [("zbv", "dualpipev"), ("dualpipev", "zbv")])
def test_a_schedule_that_splits_the_backward_otherwise_is_previewed(now: str, then: str) -> None:
    flight = Flight(f"schedule.name={now}", "knobs.micro_batches=16")
    estimates = flight.preview({"schedule": then})
    assert estimates["bubble_bound"].known and estimates["step_ms"].known
