"""Ranks are grouped by equal stacks, and one sentence names the rank whose stack differs and the line of code where
this rank is."""

import pytest

from agents.protocol import CodeFrame, RankStacks, StacksCollected, ThreadStack, Unanswered
from agents.state.stack_groups import explanation, ranks_text

TORCH = "/lib/python3/site-packages/torch/distributed.py"


def stacks(rank: int, *frames: tuple[str, int, str], step: int = 7) -> RankStacks:
    code = [
        CodeFrame(file, line, function, installed="site-packages" in file) for file, line, function in frames
    ]
    return RankStacks(rank, "q", step, "forward", 0.0, [ThreadStack("MainThread", code)])


def reducing(rank: int, line: int = 41, inside: int = 2812) -> RankStacks:
    return stacks(rank, ("/job/train.py", line, "train"), (TORCH, inside, "all_reduce"))


def saving(rank: int) -> RankStacks:
    return stacks(rank, ("/job/train.py", 52, "train"), ("/job/train.py", 77, "save_checkpoint"))


def end(world: int, *unanswered: Unanswered) -> StacksCollected:
    return StacksCollected("q", world, world - len(unanswered), list(unanswered))


def test_the_rank_that_is_elsewhere_is_named_with_its_line() -> None:
    answers = [saving(3), *(reducing(rank, inside=2812 + rank) for rank in (0, 1, 2, 4, 5, 6, 7))]
    found = explanation(answers, end(8))
    assert found.sentence == (
        "7 of 8 ranks wait in all_reduce (train.py:41); rank 3 is in save_checkpoint (train.py:77)"
    )
    assert found.odd == (3,) and [group.ranks for group in found.groups] == [(0, 1, 2, 4, 5, 6, 7), (3,)]


def test_two_calls_of_one_function_are_named_by_the_lines_that_call_it() -> None:
    def reduce_at(rank: int, line: int) -> RankStacks:
        inner = ("/job/comm.py", 9, "Comm.reduce"), (TORCH, 2812, "all_reduce")
        return stacks(rank, ("/job/train.py", line, "train"), *inner)

    found = explanation([*(reduce_at(rank, 29) for rank in (0, 1, 2)), reduce_at(3, 31)], end(4))
    assert found.sentence == (
        "3 of 4 ranks wait in Comm.reduce (train.py:29); rank 3 waits in Comm.reduce (train.py:31)"
    )


@pytest.mark.parametrize(
    ("answers", "odd", "sentence"),
    [
        ([reducing(0), saving(1)], (1,), "1 of 2 ranks wait in all_reduce (train.py:41); rank 1 is in save_"),
        ([reducing(0), reducing(1, 60)], (), "the ranks are at 2 places, none of which has more ranks than"),
        (
            [reducing(0), reducing(1)],
            (),
            "all 2 ranks wait in all_reduce (train.py:41): no rank is elsewhere",
        ),
        ([], (), "no rank sent its stack"),
        ([stacks(0), reducing(1)], (0,), "1 of 2 ranks wait in all_reduce (train.py:41); rank 0 is in no Py"),
    ],
    ids=["only one waits", "no majority", "no odd rank", "no answer", "no frames"],
)
def test_without_a_majority_nothing_is_guessed(
    answers: list[RankStacks], odd: tuple[int, ...], sentence: str
) -> None:
    found = explanation(answers, end(2))
    assert found.sentence.startswith(sentence) and found.odd == odd


def test_a_rank_without_an_answer_is_odd_and_text_of_a_run_is_cleaned() -> None:
    answers = [stacks(rank, ("/job/a\x1b[31m.py", 1, "ev\u202eil")) for rank in (0, 2)]
    found = explanation(answers, end(3, Unanswered(1, "process 5 is\nsuspended")))
    assert found.sentence == (
        "2 of 3 ranks are in ev il (a [31m.py:1); rank 1 did not answer: process 5 is suspended"
    )
    assert found.odd == (1,)


def test_ranks_that_wait_at_many_places_wait_for_the_one_that_does_not() -> None:
    waiting = [reducing(rank, line=20 + rank // 2) for rank in (0, 1, 2, 4, 5, 6, 7)]
    found = explanation([*waiting, saving(3)], end(8))
    assert found.odd == (3,) and found.sentence == (
        "7 of 8 ranks wait at 4 places, most of them in all_reduce (train.py:20); "
        "rank 3 is in save_checkpoint (train.py:77)"
    )


def test_ranks_at_an_earlier_step_are_odd() -> None:
    answers = [reducing(rank, line=20 + rank // 2) for rank in (0, 1, 2, 3)]
    behind = stacks(4, ("/job/train.py", 60, "train"), (TORCH, 99, "recv"), step=6)
    found = explanation([*answers, behind], end(5))
    assert found.odd == (4,) and found.sentence.endswith("; rank 4 waits in recv (train.py:60)")


def test_only_some_ranks_were_asked() -> None:
    found = explanation([reducing(0), saving(3)], StacksCollected("q", 8, 2))
    assert found.sentence.startswith("1 of 2 ranks asked wait in all_reduce (train.py:41); rank 3 is in")


def test_ranks_are_written_as_ranges() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert ranks_text(range(0, 40, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 12 more"
    assert ranks_text([*range(0, 16, 2), 20, 21, 22]).endswith(" 14 and 3 more")
