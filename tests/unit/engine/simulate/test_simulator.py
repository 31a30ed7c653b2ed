"""Tests of a simulated step: the seed determines all its numbers, the numbers are consistent with each other, and each
knob has its effect."""

from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest
from msgspec import structs

from agents.protocol import Hello, Step, Timeline, codec
from agents.protocol.held_experts import held_texts, read_held
from engine.config.refusal import LayoutError, RefusedError
from engine.planner.memory.plan import plan_memory
from engine.planner.timing.predict import predict
from engine.planner.workload.communication.traffic import traffic
from engine.simulate.scenario import Scenario
from engine.simulate.simulator import Simulated, Simulator
from engine.simulate.telemetry.packing import frames
from tests.unit.engine.simulate.simulated import Run, machine, small


def rank_steps(run: Run, found: Simulated) -> list[Step]:
    return [message for message in run.messages(found) if isinstance(message, Step)]


# --------------------------------------------------------------------------------------------- determinism


def story(seed: int) -> list[bytes]:
    run = Run(seed=seed)
    packed = []
    for number in range(12):
        if number == 5:
            run.change(micro_batches=16, lr_scale=2.0)
        if number == 8:
            run.change(expert_placement="load")
        found = run.step()
        packed += [codec.encode([found.summary]), run.records.steps(found, found.summary.revision).tobytes()]
    return packed


def test_the_same_seed_and_changes_give_the_same_bytes() -> None:
    assert story(3) == story(3)
    assert story(3) != story(4)


# --------------------------------------------------------------------------------------------- consistency


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("grid.pp=1",),
        ("model.moe=none", "grid.ep=1"),
        ("schedule.name=zbv",),
        ("grid.cp=2", "grid.dp_replicate=2"),
        ("grid.ep_method=hierarchical",),
        ("model.moe.router=expert_choice", "model.moe.balance=none"),
        ("knobs.capacity_factor=1.0", "knobs.recompute=full"),
    ],
)
def test_the_numbers_of_a_step_agree(overrides: tuple[str, ...]) -> None:
    run = Run(small(*overrides))
    layout, cluster = run.layout, run.simulator.cluster
    found = run.steps(3)[-1]
    steps, summary = rank_steps(run, found), found.summary
    assert [step.rank for step in steps] == list(range(layout.ranks.world))
    for step in steps:
        assert step.step_ms == pytest.approx(summary.step_ms)
        assert 0 < sum(step.phases.values()) <= step.step_ms * (1 + 1e-9)
        assert 0 <= step.own_ms <= step.step_ms
        assert (
            step.tokens_per_s
            and step.tokens
            and step.tokens_per_s == pytest.approx(1e3 * step.tokens / step.step_ms)
        )
        assert all(lane.bytes >= 0 and lane.ms >= lane.exposed_ms >= 0 for lane in step.comm.values())
        if step.bubble is not None:
            assert step.bubble_parts and sum(step.bubble_parts.values()) == pytest.approx(step.bubble)
    if layout.grid.pp > 1:
        assert summary.bubble is not None and summary.bubble_bound is not None
        assert 0 < summary.bubble_bound <= summary.bubble < 1
        assert fmean(step.bubble or 0.0 for step in steps) == pytest.approx(summary.bubble)
    else:
        assert summary.bubble is None and steps[0].bubble is None
    assert sum(step.a2a_bytes or 0 for step in steps) == summary.a2a_bytes
    assert sum(step.dropped or 0 for step in steps) == summary.dropped
    assert summary.mfu is not None and 0 < summary.mfu < 1
    assert fmean(step.mfu or 0.0 for step in steps) == pytest.approx(summary.mfu)
    for message in run.records.peers(found, range(cluster.world)):
        assert sum(to.bytes for to in message.sent) == steps[message.rank].a2a_bytes  # type: ignore[union-attr]
    moe = layout.model.moe
    if moe and found.routed:
        pairs = layout.train.global_batch * layout.model.seq_len * moe.top_k
        for layer in layout.model.layers_with_experts:
            assert found.routed.load[layer].sum() == pairs
            assert found.routed.dropped[layer] <= pairs


def test_layers_of_multi_token_prediction_run_on_the_last_stage() -> None:
    """With expert choice, all experts have equal loads, so every layer sends as many bytes. The last of two stages has
    one layer of the model, and two that predict further tokens."""
    balanced = ("model.moe.router=expert_choice", "model.moe.balance=none")
    run, without = Run(small(*balanced, "model.mtp_layers=2")), Run(small(*balanced))
    found = run.step()
    assert [run.simulator.layers_of(pp) for pp in (0, 1)] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    assert found.routed and found.routed.load.astype(bool).all() and len(found.routed.load) == 10
    first, *_, last = rank_steps(run, found)
    # Of the rows of 16 slices of 1024 / 4 tokens with two experts each, 7 of 8 leave the rank; there and back, twice.
    of_a_layer = 4 * (16 * 1024 // 4 * 2 * 7 // 8) * 1024 * 2
    assert (first.a2a_bytes, last.a2a_bytes) == (7 * of_a_layer, 3 * of_a_layer)
    # A layer has four projections, scores and weighted sum over 512 keys, a router and two experts of three matrices.
    D, keys = 1024, 512
    layer = 2 * (4 * D * D + 2 * keys * D + 16 * D + 2 * 3 * D * 2048)
    each = layer + 2 * 2 * D * D + 2 * D * 32768
    more = run.simulator._flops.sum() - without.simulator._flops.sum()
    assert more == pytest.approx(2 * each * 3 * 16 * 1024 / 4, rel=1e-9)


def test_a_timeline_is_the_schedule() -> None:
    run = Run()
    found = run.step()
    timelines = list(run.records.timelines(found))
    assert [type(one) for one in timelines] == [Timeline] * 2
    ends = {(a.kind, a.stage, a.micro_batch): a.end_ms for one in timelines for a in one.actions}
    for one in timelines:
        for before, after in zip(one.actions, one.actions[1:], strict=False):
            assert before.end_ms <= after.start_ms + 1e-9
        assert one.actions[-1].end_ms <= one.window_ms
    for one in timelines:
        for action in one.actions:
            if action.kind == "F" and action.stage == 1:
                assert ends["F", 0, action.micro_batch] <= action.start_ms + 1e-9


def test_a_precision_without_a_peak_is_refused() -> None:
    known = machine()
    device = structs.replace(known.device, peak={"bf16": 1e15})
    with pytest.raises(
        RefusedError, match=r"train\.precision = fp32 has no peak rate on H100; legal on this machine: bf16"
    ):
        Simulator(small("train.precision=fp32"), structs.replace(known, device=device), Scenario(), 1)


SILENT = "[noise]\ncompute = 0.0\ndevice = 0.0\nnetwork = 0.0"


@pytest.mark.parametrize(
    "overrides",
    [
        ("grid.pp=1", "model.moe=none", "grid.ep=1"),
        ("grid.pp=1", "model.moe.router=expert_choice", "model.moe.balance=none"),
        ("grid.pp=1", "knobs.recompute=full", "train.zero=3"),
        ("model.moe=none", "grid.ep=1", "knobs.micro_batches=16"),
        ("model.moe=none", "grid.ep=1", "schedule.name=zbv"),
    ],
)
def test_the_clock_is_the_planners_prediction(overrides: tuple[str, ...]) -> None:
    run = Run(small(*overrides), SILENT)
    found = run.step()
    predicted = predict(found.job, machine(), run.layout.plan.release)
    # For uneven pipeline stages the planner has an approximate closed form, while the simulator simulates the schedule.
    near = 1e-6 if run.layout.grid.pp == 1 else 0.1
    assert found.times.step_s == pytest.approx(predicted.step_s[1], rel=near)


def test_the_planned_bubble_is_the_mean_over_ranks_like_the_measured_one() -> None:
    run = Run(small("model.moe=none", "grid.ep=1", "model.layers=6", "plan.split=[5,1]"), SILENT)
    found = run.step()
    predicted = predict(found.job, machine(), run.layout.plan.release)
    assert found.summary.bubble and found.summary.bubble > 0.3
    assert predicted.bubble == pytest.approx(found.summary.bubble, rel=0.1)  # the schedule in closed form


@pytest.mark.parametrize("way", ["grid.ep_method=direct", "grid.ep_method=hierarchical"])
def test_bytes_of_an_even_router_are_the_planners(way: str) -> None:
    run = Run(small("model.moe.router=expert_choice", "model.moe.balance=none", way))
    found = run.step()
    for rank in (0, 7, 31):
        for axis, expected in traffic(found.job, rank).items():
            assert found.bytes[axis][rank] == pytest.approx(expected, rel=1e-3), (rank, axis)


def test_records_of_many_ranks_fit_into_frames() -> None:
    run = Run(small("grid.dp_replicate=64", "train.global_batch=4096"))
    found = run.step()
    sizes = [len(frame) for frame in frames(run.records.steps(found, 0))]
    assert len(sizes) > 1 and max(sizes) <= 1 << 18
    assert len(rank_steps(run, found)) == 2048


def test_hidden_collectives_take_time_that_is_not_exposed() -> None:
    found = {}
    for overlap in (False, True):
        run = Run(small(f"plan.overlap_experts={str(overlap).lower()}"))
        found[overlap] = rank_steps(run, run.steps(3)[-1])[0].comm
    hidden, shown = found[True]["ep"], found[False]["ep"]
    assert hidden.exposed_ms < 0.9 * shown.exposed_ms
    assert hidden.ms > hidden.exposed_ms
    reduced = found[True]["dp"]
    assert reduced.ms >= reduced.exposed_ms and hidden.bytes == shown.bytes


# ------------------------------------------------------------------------------------------------- knobs


def memory(found: Simulated) -> float:
    return plan_memory(found.job, machine()).peak


Quantity = Callable[[Simulated], float]

KNOBS: dict[str, tuple[dict[str, object], Quantity, int, int]] = {
    # the change; the affected quantity; the sign of the quantity's change; steps before the comparison
    "more micro-batches, less bubble": ({"micro_batches": 16}, lambda s: s.summary.bubble_bound or 0, -1, 1),
    "gpipe idles more on uneven stages": ({"schedule": "gpipe"}, lambda s: s.summary.bubble_bound or 0, 1, 1),
    "recompute takes time": ({"recompute": "full"}, lambda s: s.summary.step_ms, 1, 1),
    "recompute saves memory": ({"recompute": "full"}, lambda s: memory(s), -1, 1),
    "recompute repeats all-to-alls": ({"recompute": "full"}, lambda s: s.summary.a2a_bytes or 0, 1, 1),
    "a capacity drops": ({"capacity_factor": 0.8}, lambda s: s.summary.dropped or 0, 1, 1),
    "no learning rate, no progress": ({"lr_scale": 0.0}, lambda s: s.summary.loss or 0, 1, 40),
    "the learning rate is shown": ({"lr_scale": 0.5}, lambda s: s.summary.lr or 0, -1, 1),
    "balancing by a loss": ({"aux_loss_coef": 0.1}, lambda s: s.summary.load_max_over_mean or 0, -1, 40),
    "balancing by a bias": ({"bias_rate": 0.01}, lambda s: s.summary.load_max_over_mean or 0, -1, 40),
    "experts are placed by load": ({"expert_placement": "load"}, lambda s: float(s.job.imbalance), -1, 2),
}


@pytest.mark.parametrize("what", KNOBS)
def test_each_knob_changes_what_it_should(what: str) -> None:
    change, quantity, direction, steps = KNOBS[what]
    without, changed = Run(), Run()
    for run in (without, changed):
        run.steps(3)
    changed.change(**change)  # type: ignore[arg-type]
    a, b = quantity(without.steps(steps)[-1]), quantity(changed.steps(steps)[-1])
    assert np.sign(b - a) == direction, f"{a} became {b}"


def test_zero_3_gathers_for_each_micro_batch() -> None:
    run = Run(small("grid.pp=1", "train.zero=2"))
    before = run.step().summary.comm["dp"].bytes
    run.change(zero=3)
    assert run.step().summary.comm["dp"].bytes > before


def test_clipping_shortens_a_spike() -> None:
    spike = '[[events]]\nkind = "loss_spike"\nstep = 5\nsteps = 1'
    clipped, free = Run(scenario=spike), Run(scenario=spike)
    free.change(grad_clip=None)
    assert free.steps(15)[-1].loss > clipped.steps(15)[-1].loss


def test_z_loss_calms_routing() -> None:
    calm, free = (Run(small("model.moe.balance=none")) for _ in range(2))
    calm.change(z_loss_coef=1.0)
    assert calm.steps(80)[-1].summary.load_max_over_mean < free.steps(80)[-1].summary.load_max_over_mean  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"micro_batches": 3}, "micro_batches = 3 is not legal; legal: 2, 4, 8, 16"),
        ({"schedule": "zbv"}, "schedule = zbv is not legal; legal: gpipe, 1f1b"),
        ({"warp": 9}, "there is no knob warp; the knobs are micro_batches"),
        ({"save": True}, "there is no knob save; the knobs are micro_batches"),
        ({"profile": 3}, "there is no knob profile; the knobs are micro_batches"),
    ],
)
def test_a_knob_is_refused_as_in_training(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Run().change(**changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ scenarios


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("events = 3", "events = 3 is not legal; legal: sections [[events]]"),
        ("[noise]\nwind = 1", "noise.wind is not a key of a scenario; legal: compute, device, network, loss"),
        ("[[events]]\nkind = 'storm'", "events[0].kind = 'storm' is not legal; legal: straggler, slowdown"),
        ("[[events]]\nkind = 'lost'\nstep = 1", "events[0].node is missing; legal: a whole number from 0"),
        (
            "[[events]]\nkind = 'straggler'\nstep = 1\nrank = 32",
            "events[0].rank = 32 is not a rank of this layout; legal: 0 to 31",
        ),
        (
            "[[events]]\nkind = 'throttle'\nstep = 1\nnode = 4",
            "events[0].node = 4 is not one of the 4 nodes of 8 ranks; legal: 0 to 3",
        ),
        ("weather = 1", "'weather' is not a key of a scenario; legal: noise, events"),
        ("x =", "scenario is not TOML"),
    ],
)
def test_a_scenario_is_refused_in_a_sentence(text: str, why: str) -> None:
    with pytest.raises(LayoutError) as refusal:
        Run(scenario=text)
    assert why in str(refusal.value) and "\n" not in str(refusal.value)


def test_events_of_experts_need_experts() -> None:
    dense = small("model.moe=none", "grid.ep=1")
    with pytest.raises(LayoutError, match="kind = skew needs experts, and this layout has none"):
        Run(dense, "[[events]]\nkind = 'skew'\nstep = 1")


# ----------------------------------------------------------------------------------------------- placement


def holders(run: Run) -> dict[tuple[int, int], list[int]]:
    """Maps each (layer, expert) to the ranks whose hello messages list this expert."""
    found: dict[tuple[int, int], list[int]] = {}
    for hello in run.introductions():
        if isinstance(hello, Hello):
            held = read_held(held_texts(hello.facts))
            for layer, expert in np.ndindex(8, 16):
                if any(one.has(layer, expert) for one in held):
                    found.setdefault((layer, expert), []).append(hello.rank)
    return found


def test_hellos_say_which_ranks_hold_an_expert_before_and_after_a_placement() -> None:
    run = Run(small("grid.dp_replicate=2", "train.global_batch=128"))
    before = holders(run)
    assert len(before) == 8 * 16 and {len(ranks) for ranks in before.values()} == {4}  # 32 ranks, ep 8
    assert before[0, 5] == [2, 10, 18, 26] and before[7, 5] == [34, 42, 50, 58]
    run.steps(3)
    run.change(expert_placement="load")
    run.step()
    after = holders(run)
    assert after != before and run.simulator.router
    ep = run.simulator.router.placement[3].index(9) // 2
    assert {rank % 8 for rank in after[3, 9]} == {ep} and len(after[3, 9]) == 4
