"""The schedule's clock against the textbook, and against torch's own order of actions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planner.schedule import bubble, order


@given(st.integers(1, 8), st.integers(1, 32), st.floats(0.1, 10), st.floats(0.1, 10))
def test_balanced_stages_idle_as_the_textbook_says(
    p: int, extra: int, forward: float, backward: float
) -> None:
    m = p + extra - 1
    textbook = (p - 1) / (m + p - 1)
    for name in ("gpipe", "1f1b"):
        assert bubble(name, m, [forward] * p, [backward] * p) == pytest.approx(textbook)


@given(st.integers(2, 6), st.integers(0, 20), st.integers(0, 5))
def test_every_action_once_and_forward_first(p: int, extra: int, stage: int) -> None:
    m, stage = p + extra, min(stage, p - 1)
    for name in ("gpipe", "1f1b"):
        acts = order(name, stage, p, m)
        assert sorted(acts) == sorted([(kind, n) for kind in "FB" for n in range(m)])
        assert all(acts.index(("F", n)) < acts.index(("B", n)) for n in range(m))


def test_1f1b_holds_few_activations() -> None:
    for stage in range(4):
        alive = most = 0
        for kind, _ in order("1f1b", stage, 4, 16):
            alive += 1 if kind == "F" else -1
            most = max(most, alive)
        assert most == 4 - stage


def test_an_unbalanced_stage_makes_the_others_wait() -> None:
    assert bubble("1f1b", 8, [1, 1], [2, 2]) < bubble("1f1b", 8, [1, 2], [2, 4])
    # The slow stage is busy all the time but for the first forward; the fast one half of it.
    assert bubble("1f1b", 100, [1, 2], [1, 2]) == pytest.approx(0.25, abs=0.01)
