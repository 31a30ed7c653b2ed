"""Tests of drawn lines, grid layouts and curves: widths are exact, every rank is drawn once, and no missing value is
drawn as zero."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from rich.cells import cell_len

from agents.protocol import Board, Experts, KnobState, LayerLoad, Legal, Traffic
from cockpit.data import format
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine, bar, column, named
from cockpit.tui.drawing.theme import palette
from cockpit.tui.drawing.themes import THEMES
from cockpit.tui.session import Selection
from cockpit.tui.widgets.experts.heat import load_bin, marked
from cockpit.tui.widgets.experts.load import ExpertLoad
from cockpit.tui.widgets.knobs import KnobSummary
from cockpit.tui.widgets.ranks.arrangement import bands, own_axes, plan, step_from
from cockpit.tui.widgets.traffic.by_axis import TrafficByAxis
from engine.config.grid import Grid
from tests.screens.fake_run import FakeRun, big
from tests.unit.agents.fleet import make_hello, make_summary

COLOURS = palette("cockpit-dark")


@given(st.text(max_size=40), st.integers(1, 60))
def test_a_strip_has_the_exact_width_and_no_control_characters(text: str, width: int) -> None:
    strip = StripLine().add(text, COLOURS.text).add("tail", COLOURS.dim).strip(width, COLOURS.text)
    assert strip.cell_length == width
    assert "\x1b" not in strip.text
    assert all(segment.style is not None for segment in strip)


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [
        (None, 1, "    ·"),
        (math.nan, 1, "    ·"),
        (0.0, 1, "  0.0"),
        (412.4, 1, "412.4"),
        (12345.6, 1, "12346"),
    ],
)
def test_fixed_keeps_its_width_and_never_shows_missing_as_zero(value: float, digits: int, shown: str) -> None:
    assert format.fixed(value, 5, digits) == shown


def test_bars() -> None:
    assert bar(0.5, 4) == "██  "
    assert column(0.0, 2) == [" ", "▁"]  # a dead expert is drawn
    assert column(1.0, 2) == ["█", "█"]
    assert load_bin(0.0) == 0
    assert load_bin(1.0) == 3


def coords(run: FakeRun) -> dict[int, dict[str, int]]:
    return {rank: run.coords(rank) for rank in range(run.world)}


@pytest.mark.parametrize(
    "text", ["forward", "a name that is too long", "データ読込", "[b]データ読込の時間[/b]"]
)
def test_a_name_has_the_width_of_its_column(text: str) -> None:
    shown = named(text, 12)
    assert cell_len(shown) == 12 and shown.endswith(" ") and shown.strip()[:3] == text[:3]


@pytest.mark.parametrize("glyph", [" ", "▃", "█"])
def test_a_bar_under_the_cursor_keeps_its_shape(glyph: str) -> None:
    colours = COLOURS
    style = marked(glyph, colours.text, colours)
    assert (style.color, style.bgcolor) == (
        colours.strong.color,
        colours.cursor.bgcolor,
    ) and not style.reverse


def test_ep_is_recognised_as_a_derived_axis() -> None:
    assert own_axes(coords(FakeRun())) == ["pp", "dp", "tp"]


def test_cp_is_an_axis_like_the_others() -> None:
    grid = Grid(pp=2, cp=2, tp=2, ep=4)
    over_cp = {rank: grid.shown(rank) for rank in range(grid.world)}
    assert own_axes(over_cp) == ["pp", "cp", "tp"]
    found, columns = bands(over_cp, "cp")
    assert [(band.label, band.ranks) for band in found] == [("cp0", [0, 1, 4, 5]), ("cp1", [2, 3, 6, 7])]
    assert columns == ["tp 0", "tp 1"]


@pytest.mark.parametrize(
    ("sent", "text"), [(9.6e9, "9600.0 MB"), (9.6e10, "96.0 GB"), (1.6e15, "1600.0 TB"), (5e16, "50.0 PB")]
)
def test_traffic_has_one_unit_that_suits_the_largest(sent: float, text: str) -> None:
    store = Store()
    comm = {"ep": Traffic(int(sent), 2.0, 1.0)}
    store.apply([make_hello(0, 1), structs.replace(make_summary(3), comm=comm)])
    _, row = TrafficByAxis("traffic").draw(store, 80, 3, COLOURS)
    assert text in row.strip(80, COLOURS.text).text


def test_traffic_has_a_row_for_each_axis_with_bytes() -> None:
    nothing, some = Traffic(0, 0.0, 0.0), Traffic(1, 0.5, 0.5)
    comm = {"pp": nothing, "dp": some, "cp": some, "tp": Traffic(0, 0.1, 0.1)}
    store = Store()
    store.apply([make_hello(0, 1), structs.replace(make_summary(1), comm=comm)])
    panel = TrafficByAxis("traffic")
    _, *rows = panel.draw(store, 90, 9, COLOURS)
    assert [row.strip(90, COLOURS.text).text.split()[0] for row in rows] == ["cp", "dp"]
    assert panel.natural_height(store) == 3


@pytest.mark.parametrize("group", ["pp", "dp", "tp", "ep"])
@pytest.mark.parametrize("run", [FakeRun(), big()], ids=["8", "1024"])
@pytest.mark.parametrize("size", [(74, 15), (49, 8), (90, 30), (20, 4)])
def test_every_rank_is_drawn_once_inside_the_panel(run: FakeRun, group: str, size: tuple[int, int]) -> None:
    width, height = size
    found, columns = bands(coords(run), group)
    how = plan(found, columns, width, height, 19)
    placed = [rank for row in how.grid for slot in row for rank in slot]
    assert sorted(placed) == list(range(run.world))
    assert len(how.rows) + bool(how.columns) <= height
    assert all(how.label + how.cell * len(row.top) <= width for row in how.rows)


def test_the_cursor_reaches_every_rank() -> None:
    found, columns = bands(coords(FakeRun()), "pp")
    grid = plan(found, columns, 60, 20, 19).grid
    assert step_from(grid, None, 1, 0) == 0
    assert step_from(grid, 0, 1, 0) == 1
    assert step_from(grid, 1, 1, 0) == 1
    assert step_from(grid, 1, 0, 1) == 3
    assert step_from(grid, 3, 0, 1) == 5


@pytest.mark.parametrize("name", THEMES)
def test_every_style_has_both_colours(name: str) -> None:
    colours = palette(name)
    for style in (colours.text, colours.cursor, *colours.deviation, *colours.ramp, *colours.forward):
        assert style.color and style.bgcolor


def test_knobs_without_a_row_are_named_or_counted() -> None:
    store = Store()
    names = [f"knob_{n}" for n in range(6)]
    knobs = [KnobState(name, n, Legal(low=0, high=9), True, "") for n, name in enumerate(names)]
    knobs.append(KnobState("save", None, Legal([True]), True, "", action=True))
    store.apply(iter([Board(0, 1, "digest", knobs)]))

    def drawn(width: int, height: int) -> list[str]:
        lines = KnobSummary(Selection()).draw(store, width, height, COLOURS)
        assert len(lines) <= height
        return [line.strip(width, COLOURS.text).text.rstrip() for line in lines]

    whole = drawn(60, 7)
    assert [line.split()[0] for line in whole] == [*names, "actions"]
    assert "loss-neutral" in whole[0] and whole[-1].split() == ["actions", "save"]
    assert drawn(60, 4) == [*whole[:3], "+4  knob_3 3  knob_4 4  knob_5 5  save"]
    assert drawn(38, 4)[3] == "+4  knob_3 3  knob_4 4  knob_5 5  save"
    assert drawn(37, 4)[3] == "+4  knob_3 3  knob_4 4  knob_5 5 …"
    assert drawn(20, 1) == ["+7  knob_0 0 …"]


def experts_drawn(layers: list[LayerLoad], width: int, height: int) -> list[str]:
    store = Store()
    store.apply(iter([Experts(1, layers)]))
    lines = ExpertLoad(Selection()).draw(store, width, height, COLOURS)
    assert len(lines) <= height
    return [line.strip(width, COLOURS.text).text.rstrip() for line in lines]


def test_a_shared_cell_shows_hottest_and_coldest_and_its_size() -> None:
    """Expert 5 of layer 1 is dead, and shares one cell of the expert map with the hottest expert."""
    layers = [LayerLoad(layer, [100] * 64, 0) for layer in range(4)]
    layers[1] = LayerLoad(1, [100] * 4 + [500, 0] + [100] * 58, 0)
    lines = experts_drawn(layers, 64, 3)
    assert lines[0].split() == [
        "a",
        "cell",
        "is",
        "2",
        "layers",
        "×",
        "2",
        "experts",
        "most",
        "least",
        "drop",
    ]
    assert lines[1].startswith("L0-1 ▀▀◆▀▀") and lines[1].count("◆") == 1  # hot and dead
    assert lines[1].endswith("4.78×  0.00×   0.0 % !")
    assert lines[2].endswith("1.00×  1.00×   0.0 %") and "╳" not in lines[2]
    wide = experts_drawn(layers, 120, 5)
    assert wide[0].split()[:2] == ["64", "experts"] and "a cell" not in wide[0], (
        "each expert has its own cell"
    )
    assert wide[2].count("╳") == 1


def test_a_dead_expert_differs_from_a_cold_one() -> None:
    lines = experts_drawn([LayerLoad(0, [100, 10, 0, 100], 0)], 80, 2)
    assert "╳" in lines[1] and "▁" in lines[1] and lines[1].endswith("!")
