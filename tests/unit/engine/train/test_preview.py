"""Predicted effects of a change: from measurements if there are any, else from a simulation; without either, no number
is predicted."""

import pytest
from msgspec import structs

from agents.protocol import Estimate, Legal, Traffic, Value
from agents.rank.knob_board import Knob, KnobBoard
from engine.config.relayout import layout_text
from engine.config.toml import load
from engine.control.preview.previewer import Previewer
from engine.control.preview.schedule_effect import VARIES
from engine.planner.refit import LIKELY
from engine.planner.schedule import ScheduleClock
from tests.unit.agents.fleet import make_summary
from tests.unit.engine.config.test_layout import DEMO

TWO_STAGES = ["grid.pp=2", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1"]
MS = 10.0  # duration of an action, forward or backward


def knob(name: str, choices: list[Value], neutral: bool = True, action: bool = False) -> Knob:
    legal = Legal([one for one in choices if one is not None], optional=None in choices)
    return Knob(name, lambda _: legal, neutral, "", lambda _: None, lambda _: None, action)


def board() -> KnobBoard:
    knobs = [
        knob("micro_batches", [2, 4, 8]),
        knob("schedule", ["gpipe", "1f1b"]),
        knob("recompute", ["none", "full"]),
        knob("capacity_factor", [None, 1.0], neutral=False),
        knob("lr_scale", [0.5, 1.0], neutral=False),
        knob("save", [True], action=True),
    ]
    values: dict[str, Value] = {
        "micro_batches": 4,
        "schedule": "1f1b",
        "recompute": "none",
        "capacity_factor": 1.0,
        "lr_scale": 1.0,
    }
    return KnobBoard(knobs, values)


def seen(oversubscribed: bool = False, steps: int = 10) -> Previewer:
    """A previewer that has received `steps` steps of a run with two equally fast pipeline stages and 4 micro-batches. A
    step takes 2 (4 + 1) x 10 ms for pipeline actions, and 20 ms outside the pipeline."""
    its = board()
    previewer = Previewer(load(DEMO, TWO_STAGES), its, oversubscribed)
    clock = ScheduleClock("1f1b", 2, 1, 4)
    for step in range(steps):
        previewer.note_rank(1000, clock, [[MS / 1e3] * len(acts) for acts in clock.acts])
        comm = {"pp": Traffic(5000, 1.0, 1.0), "control": Traffic(7, 1.0, 1.0)}
        summary = structs.replace(make_summary(step), knobs=its.values, step_ms=120.0 + step % 2, comm=comm)
        previewer.note(structs.replace(summary, bubble=0.25, bubble_bound=0.2, dropped=30))
    return previewer


def found(previewer: Previewer, **changes: Value) -> dict[str, Estimate]:
    return {one.quantity: one for one in previewer(changes).estimates}


def test_more_micro_batches_are_simulated_with_an_interval() -> None:
    previewed = found(seen(), micro_batches=8)
    step = previewed["step_ms"]
    # 9 rounds of F and B; each action takes half the time or the same time. The other 20 ms do not change.
    assert step.now == pytest.approx(120.5, abs=0.2)
    assert step.low and step.high and 107.1 < step.low < step.high < 206.6
    assert step.source == (
        "the planner, fitted to 1 set of values of this run, within the bounds of the simulated schedule"
    )
    assert previewed["bubble_bound"].after == pytest.approx(1 / 9)
    bubble = previewed["bubble"]
    reach = LIKELY * VARIES
    ends = (1 - reach) / 9, (1 + reach) / 9 + 0.1  # up to twice the other idle time
    assert bubble.interval == pytest.approx(ends) and bubble.after is None
    assert previewed["comm_bytes"].after == 5000
    assert previewed["memory_bytes"].source.startswith("closed form")


def test_no_time_is_simulated_if_ranks_share_cores() -> None:
    previewed = found(seen(oversubscribed=True), micro_batches=8)
    step = previewed["step_ms"]
    assert step.after is None and "share cores" in step.source and step.source.endswith("a trial measures it")
    assert previewed["bubble_bound"].after == pytest.approx(1 / 9)


def test_a_preview_of_a_new_layout_names_no_trial() -> None:
    """A trial of a layout is refused (`agents.hub.commands.trial_rules`)."""
    layout = load(DEMO, TWO_STAGES)
    new = Knob("layout", lambda _: Legal(form="x"), True, "", lambda _: None, lambda _: None)
    its = KnobBoard([new], {"layout": layout_text(layout)})
    previewer = Previewer(layout, its, oversubscribed=True)
    previewer.note(structs.replace(make_summary(1), knobs=its.values))
    source = found(previewer, layout="grid.dp_shard=2")["step_ms"].source
    assert "share cores" in source and "trial" not in source


def test_measurements_take_precedence_over_simulation() -> None:
    previewer = seen()
    its = {**board().values, "micro_batches": 8}
    for step in range(12):  # the first two steps after a change are ignored
        summary = structs.replace(make_summary(step), knobs=its, step_ms=100.0 + step if step > 1 else 9e9)
        previewer.note(summary)
    step = found(previewer, micro_batches=8)["step_ms"]
    assert step.low and step.high and 85 < step.low < 106.5 < step.high < 130
    assert step.source.startswith("measured in this run: 10 steps with these values")


def test_steps_of_stretches_that_are_too_short_are_not_a_measurement() -> None:
    """The number of micro-batches changes every five steps, so no period with unchanged knob values has enough measured
    steps."""
    previewer = Previewer(load(DEMO, TWO_STAGES), board(), False)
    for step in range(30):
        its = {**board().values, "micro_batches": (4, 8)[step // 5 % 2]}
        previewer.note(structs.replace(make_summary(step), knobs=its, step_ms=100.0 + step))
    step_ms = found(previewer, micro_batches=8)["step_ms"]
    assert not step_ms.source.startswith("measured in this run")


def test_the_bubble_of_uneven_steps_is_averaged_over_steps() -> None:
    """In each step one of the two stages is slow, and the stages alternate. Averaged over steps, the two stages are
    equally fast, but in every step the bubble is larger than that of two equally fast stages."""
    previewer = Previewer(load(DEMO, TWO_STAGES), board(), False)
    clock = ScheduleClock("1f1b", 2, 1, 4)
    for step in range(20):
        slow = [1.5 * MS if stage == step % 2 else MS for stage in range(2)]
        previewer.note_rank(1000, clock, [[slow[act.stage] / 1e3 for act in acts] for acts in clock.acts])
        previewer.note(structs.replace(make_summary(step), knobs=board().values, bubble_bound=0.3))
    uneven = clock.bubble({kind: [MS, 1.5 * MS] for kind in "FB"})
    bound = found(previewer, schedule="gpipe")["bubble_bound"]
    assert uneven > 0.28 and bound.low and bound.high
    assert bound.low < uneven < bound.high < 1.2 * uneven and bound.low > 0.2


def test_an_interval_that_contains_the_current_value_predicts_no_direction() -> None:
    unclear = Estimate("step_ms", 100.0, 101.0, 95.0, 107.0)
    assert (unclear.direction, unclear.point) == (0, None)
    slower, faster = structs.replace(unclear, low=100.5), structs.replace(unclear, now=108.0)
    assert (slower.direction, slower.point) == (1, 101.0) and (faster.direction, faster.point) == (-1, 101.0)
    assert Estimate("peak_bytes", 5.0, 4.0).direction == -1


def test_on_shared_cores_no_time_is_given_even_if_measured() -> None:
    previewer = seen(oversubscribed=True)
    its = {**board().values, "micro_batches": 8}
    for step in range(12):
        previewer.note(structs.replace(make_summary(step), knobs=its, step_ms=800.0 + step))
    step = found(previewer, micro_batches=8)["step_ms"]
    assert (step.after, step.interval) == (None, None) and "share cores" in step.source


def test_an_optimizer_knob_affects_the_loss_but_no_time() -> None:
    previewer = seen()
    previewed = found(previewer, lr_scale=0.5)
    assert previewed["step_ms"].after == previewed["step_ms"].now
    assert previewed["dropped"].after is None
    assert previewer({"lr_scale": 0.5}).loss_neutral is False
    assert previewer({"micro_batches": 8}).loss_neutral is True


def test_without_a_capacity_nothing_is_dropped() -> None:
    previewed = found(seen(), capacity_factor=None)
    assert previewed["dropped"].after == 0.0
    assert previewed["step_ms"].after is None


def test_an_unknown_effect_has_no_number() -> None:
    for estimate in found(seen(), save=True).values():
        assert estimate.after is None and estimate.source.startswith("no data")
    fresh = found(seen(steps=0), micro_batches=8)
    assert all(one.after is None for one in fresh.values() if one.quantity != "peak_bytes")


def test_an_illegal_change_gets_the_same_refusal_as_on_the_ranks() -> None:
    with pytest.raises(ValueError, match="micro_batches = 3 is not legal; legal: 2, 4, 8"):
        seen()({"micro_batches": 3})
