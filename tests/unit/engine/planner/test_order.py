"""Tests the rule by which the planner decides whether it is certain which of two layouts is faster, and the calibration
of the rule's limits for the predicted ratio of the two step times. The tests also check the rule on all pairs of
published layouts whose measured step times differ by more than 8 %. For none of these pairs is the planner certain that
the slower layout is the faster one."""

from dataclasses import replace
from math import log

import pytest

from engine.config.grid import Grid
from engine.planner.search.order import certain, limits
from engine.planner.workload.job import Job
from tests.bench.planner.order import Pair, Predicted, calibrated, calls, left_out_calls, ratios, summary
from tests.bench.planner.plan import results
from tests.bench.published import models
from tests.bench.published.rows import rows

JOB = Job(models.LLAMA3_8B, 4096, 64, 1, Grid(dp_shard=2, tp=4))
WIDER = replace(JOB, grid=Grid(tp=8))
ONE = {"compute": 0.8, "tp": 0.2}


def times(ratio: float) -> dict[str, float]:
    """The phase times of a step that takes `ratio` seconds and consists of computation only."""
    return {"compute": ratio, "tp": 0.0}


@pytest.mark.parametrize(("other", "limit"), [(JOB, limits().same_split), (WIDER, limits().other_split)])
def test_the_order_is_certain_beyond_the_limit_of_the_ratio(other: Job, limit: float) -> None:
    for ratio, sure in ((1.01 * limit, True), (0.99 * limit, False), (1.0, False)):
        assert certain(JOB, ONE, other, times(ratio)) is sure
        assert certain(other, times(ratio), JOB, ONE) is sure
    assert limits().other_split > limits().same_split > 1


def test_a_layout_that_is_slower_in_each_cause_is_slower() -> None:
    slower = {"compute": 0.85, "tp": 0.2, "bubble": 0.02}
    assert certain(JOB, ONE, JOB, slower) and certain(JOB, slower, JOB, ONE)
    assert not certain(JOB, ONE, WIDER, slower), "layers that are split in another way run other kernels"
    assert not certain(JOB, ONE, JOB, slower | {"tp": 0.19}), "it saves time in exchanges"
    assert not certain(JOB, ONE, JOB, {"compute": 0.81, "tp": 0.2}), "1 % is as fast"
    zero3 = replace(JOB, zero=3)
    assert not certain(JOB, ONE, zero3, slower), "ZeRO 3 gathers weights for each use"


def test_limits_are_quantiles_of_the_errors_of_each_kind_of_pair() -> None:
    same = [Pair("a", True, False, 0.01 * n, 0.0) for n in range(1, 101)]
    found = calibrated([*same, Pair("a", False, False, 0.5, 0.1)], 0.9)
    assert found[True] == pytest.approx(0.91) and found[False] == pytest.approx(0.4)
    assert calibrated(same, 0.9)[False] == float("inf"), "without pairs, no order is called"


def test_calls_count_pairs_that_differ_by_more_than_8_percent() -> None:
    pairs = [
        Pair("a", True, False, 0.3, 0.2),  # called
        Pair("a", True, False, 0.3, -0.1),  # called wrongly
        Pair("a", True, False, 0.1, -0.1),  # left open
        Pair("a", True, True, 0.1, 0.2),  # called, because it is slower in each cause
        Pair("a", True, False, 0.3, -0.01),  # not checked: as fast
        Pair("a", False, False, 0.3, 0.2),  # left open: the limit of this kind is larger
    ]
    assert calls(pairs, {True: 0.25, False: 0.35}) == (3, 1, 2, pytest.approx(4 / 6))


def test_a_source_is_judged_with_the_limits_of_the_others() -> None:
    wide = [Pair("wide", True, False, 0.5, 0.1)] * 9
    narrow = [Pair("narrow", True, False, 0.2, 0.18)] * 9
    found = left_out_calls([*wide, *narrow], 0.9)
    assert found["narrow"][:3] == (0, 0, 9) and found["wide"][:3] == (9, 0, 0)
    assert found["wide"].held == 0.0 and found["narrow"].held == 1.0


def test_no_order_of_published_layouts_is_called_wrongly() -> None:
    predicted = [Predicted(one.row, log(one.mid / one.row.measured), one.phases) for one in results(rows())]
    pairs = ratios(predicted)
    known = limits()
    found = calls(pairs, {True: log(known.same_split), False: log(known.other_split)})
    assert found.wrong == 0 and found.called > 400, found
    assert found.held > 0.95
    assert f"{found.called} pairs called, 0 of them wrongly" in summary(pairs, [])[0]
