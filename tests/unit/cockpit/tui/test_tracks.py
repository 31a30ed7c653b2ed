"""Tests of the tracks (one timeline of actions per rank) on the pipeline screen: at every zoom, a track fills exactly
the number of terminal cells that is reserved for it, micro-batch numbers are never cut, and idle time and the time axis
are drawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol import Action
from cockpit.data.pipeline.pipelines import Lane
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.pipeline.tracks import Window, block_name, lane_cells, ruler

COLOURS = palette("cockpit-dark")


def drawn(lane: Lane, window: Window) -> str:
    line = StripLine()
    lane_cells(line, lane, window, COLOURS, None, None)
    assert line.width == window.cells
    return line.strip(window.cells, COLOURS.text).text


@given(
    st.lists(st.tuples(st.floats(0, 90), st.floats(0, 30)), max_size=20),
    st.floats(0, 100),
    st.floats(0.01, 100),
    st.integers(1, 80),
)
def test_a_lane_has_the_exact_width(
    times: list[tuple[float, float]], start: float, length: float, cells: int
) -> None:
    actions = tuple(
        Action("FBW"[i % 3], i, begin, begin + took, i % 2)  # type: ignore[arg-type]
        for i, (begin, took) in enumerate(sorted(times))
    )
    drawn(Lane(0, 0, actions, window_ms=120.0), Window(start, length, cells))


def test_blocks_are_named_and_idle_time_is_a_line() -> None:
    actions = (Action("F", 0, 0, 10), Action("F", 12, 10, 20), Action("B", 0, 30, 50))
    text = drawn(Lane(0, 0, actions, window_ms=60.0), Window(0, 60, 30))
    assert text == " F0   F12 ───── B0       ─────"


@pytest.mark.parametrize(("width", "name"), [(1, "F"), (2, "12"), (3, "F12"), (4, "F12c"), (6, " F12c ")])
def test_a_number_is_never_cut(width: int, name: str) -> None:
    assert block_name(Action("F", 12, 0, 1, 2), 2, width) == name


def test_a_cell_with_several_actions_shows_the_longest_kind_or_idle() -> None:
    busy = [Action("F", i, i, i + 0.3) for i in range(10)] + [
        Action("B", i, i + 0.4, i + 1) for i in range(10)
    ]
    sparse = [Action("F", i, i, i + 0.4) for i in range(10, 20)]
    lane = Lane(0, 0, tuple(sorted(busy + sparse, key=lambda action: action.start_ms)), window_ms=20.0)
    assert drawn(lane, Window(0, 20, 4)) == "bb──"


def test_a_lane_of_one_stage_marks_the_time_of_the_others() -> None:
    lane = Lane(1, 3, (Action("F", 0, 0, 4, 1),), 1, (Action("F", 0, 4, 8, 5),), window_ms=12.0)
    assert drawn(lane, Window(0, 12, 12)) == "F0  ╌╌╌╌────"


def test_the_ruler_has_round_times_at_their_cells() -> None:
    text = ruler(Window(0, 320, 64), COLOURS).strip(64, COLOURS.text).text
    assert text.startswith("╷0 ms") and text.index("╷100") == 20 and text.index("╷200") == 40
    zoomed = ruler(Window(101.3, 0.5, 60), COLOURS).strip(60, COLOURS.text).text
    assert zoomed.split()[:3] == ["╷101.4", "ms", "╷101.6"]
