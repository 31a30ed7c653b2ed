"""Compares the simulated idle time with the bubble formula, and the order of actions with torch's schedules."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.schedule_traits import SCHEDULES, accepts_micro_batches, same_partition, stages_of_rank
from engine.planner.schedule import ScheduleClock, action_order
from engine.sharding.pipeline_schedules import SCHEDULES as TORCHS

RANKS, MICRO_BATCHES = (1, 2, 3, 4), range(1, 18)
VIRTUAL = {name: [kind.virtual_stages] if kind.virtual_stages else [2, 3] for name, kind in SCHEDULES.items()}
LEGAL = [
    (name, p, v, m)
    for name in SCHEDULES
    for p in RANKS
    for v in VIRTUAL[name]
    for m in MICRO_BATCHES
    if accepts_micro_batches(name, p, v, m) and (p > 1 or v == 1)
]


class Recorded:
    """A fake stage for PyTorch's pipeline schedules with one stage per rank; it only records the forward and backward
    passes that the schedule runs."""

    def __init__(self, stage: int, stages: int):
        self.stage_index, self.num_stages = stage, stages
        self.is_last = stage == stages - 1
        self.acts: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, n: int, *_: Any, **__: Any) -> None:
        self.acts.append(("F", self.stage_index, n))

    def backward_one_chunk(self, n: int, **_: Any) -> None:
        self.acts.append(("B", self.stage_index, n))

    def perform_reduce_grad(self, factor: int) -> None:
        assert factor == 1

    def no_ops(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_ops


def single(name: str, p: int, m: int, rank: int) -> list[list[tuple[str, int, int]]]:
    """The order in which PyTorch's single-stage schedule runs actions. (The order that PyTorch prints for 1F1B differs
    from this order by one micro-batch.)"""
    stage = Recorded(rank, p)
    schedule = TORCHS[name](stage, m, loss_fn=lambda output, target: output, scale_grads=False)
    schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
    schedule._step_microbatches([()] * m, [{}] * m, [None] * m)
    return [[act] for act in stage.acts]


def several(name: str, p: int, v: int, m: int) -> dict[int, list[list[tuple[str, int, int]]]]:
    """The order in which PyTorch's multi-stage schedules run actions."""
    stages = [
        SimpleNamespace(
            num_stages=p * v,
            group_size=p,
            group_rank=0,
            stage_index=stage,
            submod=torch.nn.Identity(),
            stage_index_to_group_rank={},
        )
        for stage in stages_of_rank(name, 0, p, v)
    ]
    turns = TORCHS[name](stages, m, loss_fn=lambda output, target: output).pipeline_order
    return {
        rank: [
            [(act.computation_type.value, act.stage_index, act.microbatch_index) for act in its]
            for its in (turn.sub_actions or [turn] for turn in mine if turn is not None)
        ]
        for rank, mine in turns.items()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_equals_torchs(name: str) -> None:
    for _, p, v, m in (case for case in LEGAL if case[0] == name):
        theirs = several(name, p, v, m) if v > 1 else {rank: single(name, p, m, rank) for rank in range(p)}
        for rank in range(p):
            assert [list(map(tuple, turn)) for turn in action_order(name, rank, p, v, m)] == theirs[rank], (
                p,
                v,
                m,
            )


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_refuses_what_the_engine_refuses(name: str) -> None:
    for p in RANKS[1:]:
        for v in VIRTUAL[name]:
            for m in MICRO_BATCHES:
                if not accepts_micro_batches(name, p, v, m):
                    with pytest.raises(ValueError, match="icrobatches"):
                        several(name, p, v, m) if v > 1 else single(name, p, m, 0)


@pytest.mark.parametrize(("name", "p", "v", "m"), LEGAL)
def test_every_action_once_and_each_stage_on_one_rank(name: str, p: int, v: int, m: int) -> None:
    acts = [act for its in ScheduleClock(name, p, v, m).acts for act in its]
    assert len(acts) == len(set(acts))
    for stage in range(p * v):
        of_stage = [(act.kind, act.micro_batch) for act in acts if act.stage == stage]
        forwards = [n for kind, n in of_stage if kind == "F"]
        whole = [n for kind, n in of_stage if kind == "B"]
        split = [n for kind, n in of_stage if kind == "I"]
        assert forwards == sorted(whole + split) == list(range(m))
        assert sorted(n for kind, n in of_stage if kind == "W") == sorted(split)
        assert not split or SCHEDULES[name].split_backward
    assert sorted(stage for rank in range(p) for stage in stages_of_rank(name, rank, p, v)) == list(
        range(p * v)
    )


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_of_balanced_stages_equals_the_formula(
    p: int, rounds: int, forward: float, backward: float
) -> None:
    m = p * rounds
    for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)):
        if p > 1 or v == 1:
            costs = {"F": [forward] * p * v, "B": [backward] * p * v}
            assert ScheduleClock(name, p, v, m).bubble(costs) == pytest.approx((p - 1) / (m * v + p - 1))


def test_1f1b_holds_few_activations() -> None:
    for rank in range(4):
        alive = most = 0
        for ((kind, _, _),) in action_order("1f1b", rank, 4, 1, 16):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        assert most == 4 - rank


def test_an_unbalanced_stage_makes_the_others_wait() -> None:
    even, uneven = {"F": [1, 1], "B": [2, 2]}, {"F": [1, 2], "B": [2, 4]}
    assert ScheduleClock("1f1b", 2, 1, 8).bubble(even) < ScheduleClock("1f1b", 2, 1, 8).bubble(uneven)
    # The slow stage is idle only during the first forward; the fast stage is busy half of the time.
    clock = ScheduleClock("1f1b", 2, 1, 100)
    assert clock.bubble({"F": [1, 2], "B": [1, 2]}) == pytest.approx(0.25, abs=0.01)


def test_each_action_has_its_own_duration() -> None:
    clock = ScheduleClock("gpipe", 2, 1, 2)
    assert clock.acts[0] == [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]
    # Rank 0: F 0-1, F 1-5, waits until 10, then B. Rank 1: waits 0-1, F 1-3, waits 3-5, F 5-8, B 8-10, B 10-11.
    window, idle = clock.idle([[1, 4, 2, 2], [2, 3, 2, 1]])
    assert window == 14 and idle == [5, 6]


def test_partners_share_a_partition() -> None:
    assert same_partition("gpipe") == same_partition("1f1b") == ["gpipe", "1f1b"]
    assert "interleaved" in same_partition("interleaved") and "1f1b" not in same_partition("interleaved")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_many_cases_at_once_equal_one_by_one(name: str) -> None:
    clock = ScheduleClock(name, 4, 1 if name == "1f1b" else 2, 8)
    rng = np.random.default_rng(3)
    durations = [rng.uniform(0.5, 2.0, (len(acts), 5)) for acts in clock.acts]
    ends = clock.ends(durations)
    for case in range(5):
        window, _ = clock.idle([list(own[:, case]) for own in durations])
        assert max(end[-1, case] for end in ends) == pytest.approx(window)
