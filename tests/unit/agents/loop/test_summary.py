"""The summary of a step over all ranks: values that are not finite, ranks without loss tokens, and ranks that share
their tokens."""

import math
import threading
from typing import Any

import pytest

import agents
from agents.alerts.training import Loss
from agents.loop.coordinates import batch_of
from agents.loop.step import discard
from agents.protocol import Step, Summary
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_hello
from tests.unit.agents.loop.test_loop import DEADLINE_S, Around, Sent

NAN, INF = math.nan, math.inf


def stepped(
    *metrics: dict[str, Any], axes: list[dict[str, int]] | None = None, agree: bool = True
) -> tuple[Summary, list[Step]]:
    """Run one step with a rank for each of `metrics`. Returns the summary, and the record of each rank."""
    world, around = len(metrics), Around(len(metrics))
    sent: dict[int, Sent] = {}

    def train(rank: int) -> None:
        own = axes[rank] if axes else {"dp": rank}
        with agents.join("r", rank, world, own, around.of(rank) if agree else None, hub="none") as loop:
            sent[rank] = Sent(loop)
            with loop.step() as step:
                step.report(**metrics[rank])

    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(world)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(DEADLINE_S)
    (summary,) = sent[0].of(Summary)
    return summary, [sent[rank].of(Step)[0] for rank in range(world)]


def alert(summary: Summary, steps: list[Step]) -> list[tuple[str, tuple[int, ...]]]:
    state = RunState()
    for step in steps:
        state.apply(make_hello(step.rank, len(steps), coords={"dp": step.rank}))
    for record in (*steps, summary):
        state.apply(record)
    return [(finding.text, finding.ranks) for finding in Loss().check(state, 0.0) or []]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_nan_gradient_norm_of_any_rank_is_the_norm_of_the_job(odd: int) -> None:
    norms = [NAN if rank == odd else 1.0 + rank for rank in range(3)]
    summary, steps = stepped(*({"loss": 2.0, "tokens": 8, "grad_norm": norm} for norm in norms))
    assert summary.grad_norm is not None and math.isnan(summary.grad_norm)
    assert summary.loss == pytest.approx(2.0) and summary.not_finite == [odd]
    assert [str(step.grad_norm) for step in steps] == [str(norm) for norm in norms]
    assert alert(summary, steps) == [(f"gradient norm is nan at step 0 on rank {odd} (dp{odd})", (odd,))]


def test_nan_wins_over_infinity_and_the_loss_names_the_rank() -> None:
    ranks = [
        {"loss": 2.0, "grad_norm": INF},
        {"loss": 3.0, "grad_norm": NAN},
        {"loss": NAN, "grad_norm": 1.0},
    ]
    summary, steps = stepped(*ranks)
    assert math.isnan(summary.grad_norm or 0.0) and math.isnan(summary.loss or 0.0)
    assert alert(summary, steps) == [("loss is nan at step 0 on rank 2 (dp2)", (2,))]
    largest, _ = stepped({"grad_norm": 1.0}, {"grad_norm": INF}, {"grad_norm": 7.0})
    assert (largest.grad_norm, largest.not_finite) == (INF, [1])
    everywhere = stepped(*3 * [{"loss": NAN}])
    assert alert(*everywhere) == [("loss is nan at step 0", ())]


def test_without_agree_the_records_of_the_ranks_raise_the_alert() -> None:
    ranks = [
        {"loss": 2.0, "grad_norm": 1.0},
        {"loss": 2.0, "grad_norm": 1.0},
        {"loss": 2.0, "grad_norm": NAN},
    ]
    summary, steps = stepped(*ranks, agree=False)
    assert summary.grad_norm == 1.0
    assert alert(summary, steps) == [("gradient norm is nan at step 0 on rank 2 (dp2)", (2,))]


def test_a_rank_without_loss_tokens_has_no_loss() -> None:
    empty: list[dict[str, Any]] = [{"loss": NAN, "tokens": 0}, {"loss": NAN, "tokens": 64, "loss_weight": 0}]
    for odd in empty:
        summary, steps = stepped({"loss": 2.0, "tokens": 100}, odd, {"loss": 3.0, "tokens": 300})
        assert summary.loss == pytest.approx((2.0 * 100 + 3.0 * 300) / 400)
        assert steps[1].loss is None and summary.not_finite == [] and alert(summary, steps) == []
    assert stepped(*3 * [{"loss": NAN, "tokens": 0}])[0].loss is None
    # Without tokens and weights, all ranks count equally.
    assert stepped({"loss": 1.0}, {"loss": 2.0}, {"loss": 6.0})[0].loss == pytest.approx(3.0)


def test_an_overflow_that_the_scaler_skipped_is_no_alert() -> None:
    skips = {"loss": 2.0, "grad_norm": INF, "skipped": True, "loss_scale": 65536.0}
    summary, steps = stepped({"loss": 2.0, "grad_norm": 1.0}, {"loss": 2.0, "grad_norm": 1.0}, skips)
    assert (summary.skipped, summary.grad_norm) == (True, INF) and alert(summary, steps) != []
    summary, steps = stepped(*3 * [skips])
    assert (summary.skipped, summary.loss_scale) == (True, 65536.0)
    assert [step.grad_norm for step in steps] == [None] * 3 and alert(summary, steps) == []


# ------------------------------------------------------------------------------------------ tokens

GRID = [
    {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    for pp in range(2)
    for dp in range(2)
    for cp in range(2)
    for tp in range(2)
]


def test_ranks_that_share_their_tokens_count_them_once() -> None:
    # 4 sequences of 16 tokens, one batch of 2 for each dp rank, half of each sequence for each cp rank.
    summary, steps = stepped(*len(GRID) * [{"loss": 1.0, "tokens": 16}], axes=GRID)
    assert summary.tokens_per_s == pytest.approx(1e3 * 4 * 16 / summary.step_ms)
    assert {step.tokens for step in steps} == {16}
    last = [{"tokens": 16} if at["pp"] == 1 and at["tp"] == 1 else {} for at in GRID]
    summary, _ = stepped(*last, axes=GRID)
    assert summary.tokens_per_s == pytest.approx(1e3 * 4 * 16 / summary.step_ms)
    summary, _ = stepped(*3 * [{"tokens": 16}])
    assert summary.tokens_per_s == pytest.approx(1e3 * 48 / summary.step_ms)


def test_only_the_axes_tp_and_pp_share_tokens() -> None:
    assert batch_of({"dp": 3}) is None and batch_of({}) is None
    assert batch_of({"pp": 1, "dp": 3, "cp": 0, "tp": 2, "ep": 1}) == [3, 0, 1]
    assert batch_of({"tp": 1}) == []


def test_a_trial_whose_loss_is_not_finite_is_reverted() -> None:
    from agents.hub.commands.trial_rules import judged
    from agents.hub.commands.trial_window import Measured
    from agents.protocol import TrialState
    from agents.recording.commands import TrialEntry

    state = TrialState("t", "after", {"k": 2}, {"k": 1}, 16, "me", 0.0, True, 0.0)
    for loss, why in ((2.0, ""), (NAN, "the loss is not finite")):
        entry = TrialEntry(state, [100.0 + n % 3 for n in range(16)])
        window = [Measured(n, 50.0 + n % 3, loss if n == 9 else 2.0) for n in range(16)]
        assert judged(entry, window)[1] == why


# ------------------------------------------------------------------------------------------ operations


def test_the_operation_of_a_rank_outside_its_steps() -> None:
    with agents.join("r", hub="none") as loop:
        with loop.operation("evaluation"):
            assert loop.doing[:2] == (0, "evaluation")
        assert loop.doing[1] == "starting"
        with loop.step(3) as step:
            with step.phase("data, own code", "between steps"):
                assert loop.doing[:2] == (3, "between steps")
            assert loop.doing[1] == "step"
            with pytest.raises(KeyError), loop.operation("checkpoint"):
                raise KeyError
            assert loop.doing[1] == "step"
        assert loop.doing[:2] == (3, "between steps")
        unused = loop.step(4)
        unused.__enter__()
        discard(unused)
        assert loop.doing[:2] == (4, "between steps")
