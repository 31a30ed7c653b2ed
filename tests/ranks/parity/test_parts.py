"""Each feature of the engine (such as latent attention or shared experts) is covered by a parity case that uses at most
one grid axis, and by at least six cases that use several axes."""

from tests.ranks.parity.parts import MIXES, counts


def test_each_part_is_in_enough_cases() -> None:
    few = {part: found for part, found in counts().items() if found[0] < 1 or found[1] < MIXES}
    assert not few
