"""Charts: no spike is lost, no line crosses missing steps, values off the scale are marked, and labels are correct."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cockpit.data.curves.segments import Segment
from cockpit.data.log.run_log import Mark
from cockpit.data.scale import LABEL, Range, Scale, choose, label, nice_range
from cockpit.tui.drawing.chart import DOTTED, XAxis, draw
from cockpit.tui.drawing.chart_lines import AXIS
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.curves.loss_and_throughput import plot

COLOURS = palette("cockpit-dark")


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_a_nice_range_holds_its_values(a: float, b: float) -> None:
    low, high = nice_range(min(a, b), max(a, b))
    assert low < high
    slack = 1e-9 * max(1.0, abs(a), abs(b))
    assert low <= min(a, b) + slack
    assert high >= max(a, b) - slack


def test_a_plot_fills_its_panel_and_marks_changes() -> None:
    lines = plot([Segment([(step, 5 - step / 50) for step in range(200)])], [Mark(100, "k")], 60, 12, COLOURS)
    strips = [line.strip(60, COLOURS.text) for line in lines]
    assert len(strips) == 12
    assert sum("╷" in strip.text for strip in strips) >= 8
    assert any(ord(char) >= 0x2800 for strip in strips for char in strip.text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.0, "2"),
        (-12.345, "-12.35"),
        (19_900.0, "19.9 k"),
        (1.234e-05, "1.2e-05"),
        (-999_900.0, "-1e+06"),
        (1e30, "1e+30"),
        (-1.25e-30, "-1e-30"),
    ],
)
def test_a_label_fits_beside_the_axis(value: float, text: str) -> None:
    assert label(value) == text and len(text) <= LABEL


def test_labels_tell_close_values_apart() -> None:
    assert Scale(2.0001, 2.0003).labels([0, 0.5, 1]) == ["2.0001", "2.0002", "2.0003"]
    assert Scale(0.001, 10.0, True).labels([0, 0.5, 1]) == ["0.001", "0.1", "10"]


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=80), st.sampled_from(Range), st.booleans())
def test_every_value_is_drawn_or_marked_off_the_scale(values: list[float], mode: Range, log: bool) -> None:
    scale, _ = choose(values, mode, log)
    assert scale.low < scale.high and all(len(text) <= LABEL for text in scale.labels([0.0, 0.5, 1.0]))
    for step, value in enumerate(values):
        axis = XAxis(0, max(1, len(values) - 1), 20)
        drawing = draw([[(step, value)]], axis, 5, scale)
        dots = any(map(any, drawing.cells))
        assert dots != bool(drawing.above | drawing.below)
        if mode is Range.FULL and abs(value) <= 1e300 and (value > 1e-290 or not log):
            assert dots


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=300))
def test_a_line_reaches_the_row_of_each_of_its_points(values: list[float]) -> None:
    """A chart shows a spike of one step, however many steps share a column."""
    scale, _ = choose(values, Range.FULL)
    axis, rows = XAxis(0, len(values) - 1, 12), 6
    drawing = draw([list(enumerate(values))], axis, rows, scale)
    for step, value in enumerate(values):
        row = min(rows - 1, round((1 - scale.place(value)) * (4 * rows - 1)) // 4)
        assert any(
            drawing.cells[near][axis.column(step)] for near in {row, max(0, row - 1), min(rows - 1, row + 1)}
        )


def test_outer_values_leave_the_scale_only_if_they_squeeze_the_others() -> None:
    wave = [2 + math.sin(step) for step in range(300)]
    assert choose(wave, Range.AUTO) == (Scale(1.0, 3.0), False)
    spiky = [*wave, 90.0]
    assert choose(spiky, Range.AUTO) == (Scale(1.0, 3.0), True)
    assert choose(spiky, Range.FULL) == (Scale(0.0, 100.0), False)
    rows = pictured(Segment(list(enumerate(spiky))))
    assert rows[0].rstrip().endswith("▲") and sum(row.count("▲") for row in rows) == 1


def test_a_constant_and_a_single_point_are_drawn() -> None:
    assert choose([3.0] * 5, Range.AUTO)[0].place(3.0) == pytest.approx(0.5)
    assert choose([], Range.AUTO)[0].low < choose([], Range.AUTO)[0].high
    assert any(ord(glyph) > 0x2800 for row in pictured(Segment([(7, 0.0)])) for glyph in row)


def test_a_dotted_line_has_gaps() -> None:
    line = [(step, 1.0) for step in range(40)]
    solid, dotted = (draw([line], XAxis(0, 39, 20), 2, Scale(0, 2), dash) for dash in ((1, 0), DOTTED))
    count = [sum(cell.bit_count() for row in one.cells for cell in row) for one in (solid, dotted)]
    assert count == [40, 20]


@pytest.mark.parametrize("height", range(2, 30))
def test_the_axis_names_the_values_of_its_rows(height: int) -> None:
    rows = pictured(Segment([(step, step / 100) for step in range(101)]), height=height)
    labels = {y: float(row[: AXIS - 2]) for y, row in enumerate(rows) if "┤" in row}
    bottom = height - 2
    if height == 2:
        assert labels == {0: 0.0}
        return
    assert labels[0] == 1.0 and labels[bottom] == 0.0 and len(labels) == (3 if height > 5 else 2)
    assert all(value == pytest.approx(1 - y / bottom, abs=1e-3) for y, value in labels.items())
    assert all(row[AXIS - 1] in "┤│" for row in rows[:-1])


def pictured(*segments: Segment, width: int = 69, height: int = 9) -> list[str]:
    return [line.strip(width, COLOURS.text).text for line in plot(segments, [], width, height, COLOURS)]


def test_no_line_crosses_missing_or_non_finite_steps() -> None:
    whole = pictured(Segment([(step, 1.0) for step in range(600)]))
    drawn = next(row for row in whole if "⠤" in row or "⠒" in row or "⣀" in row or "⠉" in row)
    assert " " not in drawn[AXIS:]
    points = [(step, 1.0) for step in range(600) if not 200 <= step < 400]
    gap = next(row for row in pictured(Segment(points)) if any(ord(glyph) > 0x2800 for glyph in row))
    assert gap[9:28].strip() and gap[50:].strip() and not gap[30:47].strip()
    points = [(step, math.nan if 200 <= step < 400 else 1.0) for step in range(600)]
    broken = pictured(Segment(points))
    assert sum(row.count("✗") for row in broken) == 20, broken
    assert not any(ord(glyph) > 0x2800 for row in broken for glyph in row[30:47])
    tenths = pictured(Segment([(step, 1.0) for step in range(0, 600, 10)]))
    assert any(" " not in row[AXIS:] for row in tenths[:-1]), (
        "a loop that reports every tenth step has no gaps"
    )


def test_bucketed_ranges_are_marked() -> None:
    buckets = Segment([(step, float(step)) for step in range(0, 512, 8)], width=32)
    newest = Segment([(step, 1.0) for step in range(512, 600)])
    assert "╌ lowest and highest of 32 steps" in pictured(buckets, newest)[-1]
    assert pictured(buckets, newest, width=38)[-1].count("╌") > 10, "the text does not fit"
    assert "╌" not in pictured(Segment(buckets.points, width=8), newest)[-1], "finer than a column"
    assert "╌" not in pictured(Segment(newest.points[:10]))[-1], "every step is drawn"


def test_no_label_of_large_numbers_is_in_another_notation() -> None:
    assert label(4.23333e6, 6) == "4.233 M"
    assert all("e" not in text for text in Scale(4.15e6, 4.3e6).labels([0.0, 1 / 3, 0.5, 1.0]))
