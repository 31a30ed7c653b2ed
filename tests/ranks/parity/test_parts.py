"""Each part of the engine is in a parity case on at most one grid axis, and in at least six cases on several axes."""

from tests.ranks.parity.parts import MIXES, counts


def test_each_part_is_in_enough_cases() -> None:
    few = {part: found for part, found in counts().items() if found[0] < 1 or found[1] < MIXES}
    assert not few
