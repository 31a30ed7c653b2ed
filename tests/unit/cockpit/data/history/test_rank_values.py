"""Tests that the rank history has the values of all ranks for a step whose records arrive a few ranks at a time."""

import random

import pytest
from msgspec import structs

from agents.protocol import Step
from cockpit.data.history.rank_values import ArrivingStep, values_of
from tests.screens.fake_run import FakeRun


@pytest.fixture
def records() -> list[Step]:
    """The step records of all ranks for one step. Rank 1 has no traffic, rank 2 has no bubble, and rank 3 has a phase
    that the other ranks do not have."""
    found = [one for one in FakeRun().step(3) if isinstance(one, Step)]
    found[1] = structs.replace(found[1], comm={})
    found[2] = structs.replace(found[2], bubble=None, bubble_bound=None, bubble_parts=None)
    found[3] = structs.replace(found[3], phases=found[3].phases | {"extra": 2.5}, revision=7, step_ms=9e4)
    return found


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_columns_do_not_depend_on_the_parts_in_which_records_arrive(
    records: list[Step], size: int, shuffled: bool
) -> None:
    whole, arriving = values_of(records), ArrivingStep()
    order = random.Random(size).sample(records, len(records)) if shuffled else records
    for first in range(0, len(order), size):
        arriving.add(order[first : first + size])
    found = arriving.by_rank()
    assert len(arriving) == len(records) and list(found.ranks) == list(whole.ranks)
    assert found.values.keys() == whole.values.keys()
    assert shuffled or list(found.values)[:6] == list(values_of(records[:size]).values)[:6], (
        "the order of phases"
    )
    for rank in whole.ranks:
        assert found.of(rank) == whole.of(rank), rank
    assert (arriving.revision, arriving.step_ms) == (7, 9e4)


def test_a_later_record_replaces_an_earlier_one(records: list[Step]) -> None:
    arriving, later = ArrivingStep(), structs.replace(records[2], step_ms=123.0)
    arriving.add(records)
    still = arriving.copy()
    arriving.add([records[2], later])
    assert arriving.by_rank().of(2)["step"] == 123.0 and len(arriving) == len(records)
    assert still.by_rank().of(2)["step"] == pytest.approx(records[2].step_ms), "a copy does not change"
