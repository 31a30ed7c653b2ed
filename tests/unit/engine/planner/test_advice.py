"""Tests the planner's advice: the bottleneck with its evidence, and the order of the recommended changes."""

import pytest

from engine.planner.advice import Candidate, Evidence, advise, bottleneck

BALANCED = Evidence(200.0, {"forward": 60.0, "backward": 110.0, "optimizer": 10.0}, {"tp": 8.0, "dp": 2.0})


@pytest.mark.parametrize(
    ("evidence", "cause", "words"),
    [
        (BALANCED, "compute", "computation takes 80 % of a step"),
        (
            Evidence(200.0, BALANCED.phases_ms, {"ep": 120.0, "tp": 8.0}),
            "ep",
            "expert all-to-alls take 60 % of a step, 120 of 200 ms",
        ),
        (
            Evidence(200.0, {"forward": 30.0, "backward": 50.0}, {}, 0.5, 0.43, micro_batches=4),
            "bubble",
            "the pipeline idles 50 % of the time, of which the schedule explains 43 %, with 4 micro-batches",
        ),
        (
            Evidence(200.0, {"forward": 20.0, "optimizer": 150.0}),
            "optimizer",
            "optimizer takes 75 % of a step",
        ),
        (
            Evidence(200.0, BALANCED.phases_ms, {}, load_max_over_mean=3.1),
            "compute",
            "the busiest expert has 3.1 times the mean load",
        ),
        (Evidence(200.0, BALANCED.phases_ms, {}, memory_share=0.97), "memory", "memory is 97 % full"),
        (Evidence(200.0), "unknown", "no phase is measured yet"),
    ],
)
def test_the_bottleneck_is_the_largest_share(evidence: Evidence, cause: str, words: str) -> None:
    found = bottleneck(evidence)
    assert found.cause == cause and words in found.sentence


def test_waiting_for_a_pipeline_stage_counts_as_bubble_not_as_exchange() -> None:
    assert bottleneck(Evidence(200.0, BALANCED.phases_ms, {"pp": 199.0})).cause == "compute"


def candidate(value: int, low: float | None, high: float | None = None, fits: str = "") -> Candidate:
    after = None if low is None or high is None else (low, high)
    return Candidate({"micro_batches": value}, 100.0, after, None, "planned", fits)


def test_a_change_that_surely_helps_ranks_above_one_that_may_hurt() -> None:
    narrow, wide = candidate(8, 85, 90), candidate(16, 20, 102)
    found = advise(BALANCED, [wide, candidate(2, 60, 95), narrow, candidate(32, 70, 120)])
    assert [(one.candidate.changes["micro_batches"], one.undecided) for one in found.ranked] == [
        (8, False),
        (2, False),
        (16, True),
        (32, True),
    ]


def test_changes_whose_intervals_overlap_may_each_be_the_best() -> None:
    found = advise(BALANCED, [candidate(2, 60, 95), candidate(8, 85, 90), candidate(16, 91, 94)])
    assert [one.candidate.changes["micro_batches"] for one in found.ranked] == [8, 16, 2]
    assert [one.candidate.changes["micro_batches"] for one in found.candidates] == [8, 2]
    assert advise(BALANCED, []).candidates == []


def test_a_change_that_is_likely_slower_is_not_ranked() -> None:
    found = advise(
        BALANCED, [candidate(2, 90, 100), candidate(8, 60, 90), candidate(16, 95, 130), candidate(32, None)]
    )
    assert [one.candidate.changes["micro_batches"] for one in found.ranked] == [8, 2]
    best = found.ranked[0]
    assert (best.least, best.likely, best.most) == (
        pytest.approx(0.1),
        pytest.approx(0.25),
        pytest.approx(0.4),
    )
    assert [one.changes for one in found.unknown] == [{"micro_batches": 32}]
    assert not found.left_out, "a change that is likely slower is neither recommended nor mentioned"


def test_what_a_trial_refuted_or_does_not_fit_is_left_out_with_a_word() -> None:
    refuted = [({"micro_batches": 8}, "step time +1.0 %")]
    too_large = "does not fit: 83 GiB of 80, pipeline rank 0, activations 41"
    found = advise(BALANCED, [candidate(8, 60, 90), candidate(2, 50, 60, too_large)], refuted)
    assert not found.ranked
    assert found.left_out == [
        "micro_batches=8 is left out: a trial of this run was not faster (step time +1.0 %)",
        "micro_batches=2 is left out: it does not fit: 83 GiB of 80, pipeline rank 0, activations 41",
    ]
