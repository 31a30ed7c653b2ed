"""Tests that after a hub restart, the cockpit keeps showing the last state before the restart until ranks have joined
again."""

from dataclasses import dataclass, field

import pytest

from cockpit.data.sources import live


@dataclass
class State:
    hellos: dict[int, str] = field(default_factory=dict)


def ranks(count: int) -> State:
    return State(dict.fromkeys(range(count), "hello"))


@pytest.mark.parametrize(
    ("joined", "waited_s", "replaces"),
    [
        (8, 0.0, True),
        (7, 0.0, False),
        (7, live.REJOIN_S, True),
        (0, 0.0, False),
        (0, 10 * live.REJOIN_S, False),
    ],
)
def test_the_picture_stays_until_ranks_have_joined(
    monkeypatch: pytest.MonkeyPatch, joined: int, waited_s: float, replaces: bool
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1000.0 + waited_s + 0.1)
    assert live._has_rejoined(ranks(joined), ranks(8), 1000.0) is replaces  # type: ignore[arg-type]


def test_a_run_without_ranks_is_adopted() -> None:
    assert live._has_rejoined(ranks(0), ranks(0), 0.0)  # type: ignore[arg-type]
