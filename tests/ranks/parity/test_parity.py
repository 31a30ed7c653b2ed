"""In each layout, the loss, the unclipped gradient norm and every gradient equal those of the single-process reference,
except for rounding."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.batches import batched, marked, runner
from tests.ranks.cases.case import PLACED, SWITCHED, ZEROED
from tests.ranks.cases.cases import QUICK, TELLING, steps_of
from tests.ranks.parity.comparison import MARGIN, assert_equal_except_for_rounding
from tests.ranks.parity.laid_out import refusing_rank
from tests.ranks.parity.one_process import ROUNDED

BATCHES = batched("parity", list(TELLING), QUICK)

Results = Callable[[str], dict[str, Any]]


def cases(wanted: Callable[[str], bool] = lambda _: True) -> list[Any]:
    return marked([name for name in TELLING if wanted(name)], BATCHES)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A function that runs a parity case, if it has not run yet, and returns its result."""
    run = runner("tests.ranks.parity", BATCHES, tmp_path_factory.mktemp, timeout_s=560)
    return lambda name: json.loads((run(name) / "result.json").read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", cases())
def test_equals_one_process(name: str, results: Results) -> None:
    assert_equal_except_for_rounding(TELLING[name], results(name), steps_of(name))


@pytest.mark.parametrize("name", cases(lambda name: TELLING[name].layout.train.precision in ROUNDED))
def test_the_tolerance_of_16_bits_detects_a_wrong_scale(name: str, results: Results) -> None:
    """A gradient that is half or twice as large as it should be has a relative difference of 0.5 or 1. In the first
    steps, the tolerance is below 0.12."""
    rounding = results(name)["rounding"]["gradient"]
    assert MARGIN[TELLING[name].layout.train.precision] * max(rounding[:5]) < 0.12
    assert MARGIN[TELLING[name].layout.train.precision] * max(rounding) < 1.0


@pytest.mark.parametrize("name", cases(lambda name: "drops" in name and TELLING[name].fp64))
def test_drops_the_same_tokens(name: str, results: Results) -> None:
    assert results(name)["dropped"] == results(name)["dropped_in_one_process"]
    assert min(results(name)["dropped"]) > 0


@pytest.mark.parametrize("name", cases(lambda name: name.startswith("demo")))
def test_trains(name: str, results: Results) -> None:
    losses = results(name)["losses"]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("name", cases(lambda name: TELLING[name].script is PLACED))
def test_experts_move_and_come_back(name: str, results: Results) -> None:
    """Experts move during a run, and the run's results still equal those of the single-process reference. If the memory
    of one rank does not suffice for a move, no rank moves experts."""
    refused, *done = results(name)["events"]
    assert refused == "experts were not moved: rank 1: this rank has no room for experts"
    assert len(done) == 4 and all(text.startswith("experts ") for text in done)
    placed = [layers > 0 for layers in results(name)["placed"]]
    assert placed == [False] * 5 + [True] * 9 + [False] * (steps_of(name) - 14)


@pytest.mark.parametrize("name", cases(lambda name: TELLING[name].script is ZEROED))
def test_zero_switches_between_steps(name: str, results: Results) -> None:
    assert [ack[1:3] for ack in results(name)["acks"]] == [["applied", at + 1] for at in ZEROED]
    assert results(name)["knobs"]["zero"] == 2


@pytest.mark.parametrize("name", cases(lambda name: TELLING[name].script is SWITCHED))
def test_switches_between_steps(name: str, results: Results) -> None:
    """Loss-neutral knobs change during a run, and the run's results still equal those of the single-process reference.
    Refused changes have no effect."""
    assert [ack[:3] for ack in results(name)["acks"]] == [
        [4, "applied", 5],
        [7, "rejected", 7],
        [9, "applied", 10],
        [11, "rejected", 11],
        [13, "applied", 14],
    ]
    assert "legal: 2, 4, 8, 16" in results(name)["acks"][1][3]
    rank = refusing_rank(TELLING[name].layout.ranks.world)
    assert results(name)["acks"][3][3] == f"rank {rank}: this rank has no room for 16 micro-batches"
    knobs = results(name)["knobs"]
    assert (knobs["micro_batches"], knobs["recompute"]) == (2, "selective")


REORDERED = {  # state of each proposal, legal values that the refusal lists, schedule at the end
    "pp reordered fp64": ("applied rejected applied applied", "legal: 2, 4, 8", "1f1b"),
    "tied zbv reordered fp64": ("applied rejected applied applied", "legal: 4, 8", "dualpipev"),
    "v reordered dp drops fp64": ("applied rejected applied applied", "legal: 4", "dualpipev"),
}


@pytest.mark.parametrize("name", cases(REORDERED.__contains__))
def test_reorders_between_steps(name: str, results: Results) -> None:
    """The schedule and the number of micro-batches change together; an illegal combination is refused."""
    states, why, schedule = REORDERED[name]
    acks = results(name)["acks"]
    assert [ack[1] for ack in acks] == states.split()
    assert why in next(ack[3] for ack in acks if ack[1] == "rejected")
    assert results(name)["knobs"]["schedule"] == schedule
