"""Tests the panels of the ranks screen as drawn: the rank grid by node and the meaning of its colours, the rank-by-step
panel, the inspector and the list of metrics."""

from dataclasses import replace

import pytest
from msgspec import structs
from rich.style import Style

from agents.protocol import Gone, Hello, Step, Vitals
from cockpit.data.format import MISSING
from cockpit.data.metrics import Against, against_text, available, read
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store
from cockpit.tui.dialogs.metric_picker import metric_line
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import palette
from cockpit.tui.session import Selection
from cockpit.tui.widgets.ranks.arrangement import Band, Plan, Row, bands, by_node, plan, step_from
from cockpit.tui.widgets.ranks.cells import Cells, legend
from cockpit.tui.widgets.ranks.details import RankDetails
from cockpit.tui.widgets.ranks.steps import RankSteps
from tests.screens.fake_run import FakeRun, big

COLOURS = palette("cockpit-dark")
SIZES = [(120, 40), (66, 18), (74, 16), (40, 10), (20, 3), (12, 1)]


def text(lines: list[StripLine]) -> list[str]:
    return [line.strip(max(1, line.width), Style(color="white")).text.rstrip() for line in lines]


def large(steps: int = 20) -> Store:
    store = Store(lambda: 0.0)
    store.apply(big().story(steps))
    return store


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("nodes", "ranks"), [(2, 4), (16, 8), (128, 8), (300, 8), (128, 7)])
def test_by_node_every_rank_has_one_cell_inside_the_panel(
    size: tuple[int, int], nodes: int, ranks: int
) -> None:
    width, height = size
    hosts = {rank: f"n{rank // ranks:03}" for rank in range(nodes * ranks)}
    how = plan(by_node(hosts), [], width, height, 19, nodes=True)
    placed = [rank for row in how.grid for slot in row for rank in slot]
    assert sorted(placed) == list(hosts)
    assert len(how.rows) <= height
    assert all(how.label + how.cell * len(row.top) <= width for row in how.rows)
    if how.shared > 1:  # a shared cell holds whole nodes
        for slot in (slot for row in how.grid for slot in row if slot):
            held = {hosts[rank] for rank in slot}
            assert len(slot) == sum(host in held for host in hosts.values())
    at, seen = 0, 0
    while (right := step_from(how.grid, at, 1, 0)) not in (None, at):
        assert right is not None
        at, seen = right, seen + 1
    assert seen == sum(bool(slot) for slot in how.grid[0]) - 1, "the cursor passes gaps between nodes"


def test_a_line_that_holds_several_groups_is_named_after_the_first() -> None:
    """A run of 4096 ranks has 128 dp groups, which share at most 19 lines, and each line needs a name."""
    coords = {rank: {"dp": rank // 4 % 128, "tp": rank % 4, "pp": rank // 512} for rank in range(4096)}
    groups: dict[int, list[int]] = {}
    for rank, at in coords.items():
        groups.setdefault(at["dp"], []).append(rank)
    found = [Band(f"dp{dp}", [("", [(rank,) for rank in ranks])]) for dp, ranks in groups.items()]
    how = plan(found, [], 66, 19, 19)
    assert len(how.rows) <= 19 and all(how.label + how.cell * len(row.top) <= 66 for row in how.rows)
    assert [row.label for row in how.rows] == [f"dp{coords[row.top[0][0]]['dp']}" for row in how.rows]
    assert sorted(rank for row in how.grid for slot in row for rank in slot) == list(range(4096))


def test_a_cell_of_a_node_shows_its_worst_rank_and_the_legend_says_so() -> None:
    store = large()
    metric = available(store)[0]
    readings = read(store, metric)
    levels = levels_of(store, metric, readings)
    hosts = {rank: f"n{rank // 8:03}" for rank in range(1024)}
    how = plan(by_node(hosts), [], 66, 12, 19, nodes=True)
    rows = text(Cells(metric, readings, levels, COLOURS, None, 4).rows(how))
    marked = [row for row in rows if "!" in row]
    assert len(marked) == 1 and "".join(rows).count("!") == how.cell - 1
    for width, words in ((100, "a cell is the worst of a node, 8 ranks"), (60, "worst of a node")):
        line = legend(metric, readings, levels, store, how, Against.PEERS, width, COLOURS)
        assert words in text([line])[0] and line.width <= width


@pytest.mark.parametrize(
    ("against", "words"),
    [
        (Against.PEERS, "better"),
        (Against.OWN, "against its own earlier steps"),
        (Against.NOTHING, "200 ▇▇▇▇▇▇▇▇▇ 320 ms"),
    ],
)
def test_the_legend_says_what_the_colours_compare(against: Against, words: str) -> None:
    store = large()
    metric = available(store)[0]
    readings = read(store, metric, against)
    how = plan(by_node(dict.fromkeys(range(1024), "n")), [], 100, 20, 19)
    line = legend(metric, readings, levels_of(store, metric, readings), store, how, against, 140, COLOURS)
    assert words in text([line])[0] and against_text(against, store) in text([line])[0]


def test_without_pipeline_stages_all_ranks_are_peers() -> None:
    store = Store()
    store.apply(
        [structs.replace(one, coords={"dp": one.rank}) for one in FakeRun().begin() if isinstance(one, Hello)]
    )
    assert against_text(Against.PEERS, store) == "against the median of the others"
    assert against_text(Against.PEERS, large()) == "against the median of its stage"


def steps_drawn(store: Store, selection: Selection, width: int = 70, height: int = 12) -> list[str]:
    return text(RankSteps(selection).draw(store, width, height, COLOURS))


def test_rank_by_step_shows_the_stripe_without_colour_and_explains_a_row() -> None:
    lines = steps_drawn(large(), Selection())
    rows, (ruler, words) = lines[:-2], lines[-2:]
    assert [row.split()[0] for row in rows] == [f"pp{stage}" for stage in range(8)]
    assert [set(row.split()[1]) for row in rows] == [{"░"}] * 4 + [{"█"}] + [{"░"}] * 3
    assert ruler.split() == ["└0", "19"] and "worst of 128 ranks" in words


def test_rank_by_step_of_a_stage_has_a_row_for_each_rank() -> None:
    panel = RankSteps(Selection(rank=517))
    panel._which = type(panel._which).STAGE
    lines = text(panel.draw(large(), 70, 140, COLOURS))
    assert [line.split()[0] for line in lines if "█" in line][:1] == ["r517"]
    assert len(lines) == 128 + 2


def test_the_selected_step_is_marked_and_a_step_that_is_not_kept_is_reported() -> None:
    store = large()
    ruler = steps_drawn(store, Selection(step=12))[-2]
    first = steps_drawn(store, Selection())[0].index("░")
    assert ruler.index("▲") == first + 12 and "▲ 12" in ruler
    assert "step 12" in RankSteps(Selection(step=12)).title(store)
    assert RankSteps(Selection(step=900)).title(store).endswith("step 900 is not kept")
    assert "▲" not in steps_drawn(store, Selection(step=900))[-2]


def test_the_columns_of_a_long_run_end_with_the_newest_step_or_fold_all() -> None:
    store = large(60)
    lines = steps_drawn(store, Selection(), width=34)
    assert lines[-2].split() == ["└30", "59"]
    panel = RankSteps(Selection())
    panel._folded = True
    lines = text(panel.draw(store, 34, 12, COLOURS))
    assert lines[-2].split() == ["└0", "59"] and "× 2 steps" in lines[-1]
    assert steps_drawn(store, Selection(step=3), width=34)[-2].startswith("   └0  ▲ 3 ")


def test_ranks_without_a_record_of_a_step_are_drawn_as_missing() -> None:
    store, run = Store(), FakeRun()
    store.apply(run.story(6))
    store.apply(update for update in run.step(6) if getattr(update, "rank", 0) == 2)
    lines = steps_drawn(store, Selection(), height=10)
    assert [line.endswith(MISSING) for line in lines[:8]] == [rank != 2 for rank in range(8)]


def inspected(store: Store, rank: int, width: int = 60, height: int = 60, step: int | None = None) -> str:
    return "\n".join(text(RankDetails(Selection(rank=rank, step=step)).draw(store, width, height, COLOURS)))


def test_the_inspector_shows_what_is_known_and_nothing_that_is_not() -> None:
    run = FakeRun(dp=8, tp=4, oversubscribed=False)
    store = Store()
    store.apply(run.story(20))
    signs = {
        "power_w": 690.0,
        "power_limit_w": 700.0,
        "device_memory_bytes": 70 << 30,
        "throttle": ["thermal"],
    }
    store.apply([Vitals(3, 19, device_memory_total=80 << 30, **signs)])  # type: ignore[arg-type]
    shown = inspected(store, 3, width=70)
    for part in (
        "r3 pp0 dp0 tp3",
        "pid 4003",
        "! slow: own time",
        "throttled by thermal",
        "of 80 GiB",
        "of 700 W",
    ):
        assert part in shown
    for part in ("forward", "waiting", "┃", "last step 19", "0 records lost", "steps 0 to 19"):
        assert part in shown
    assert "temperature" not in shown and "SM clock" not in shown and "MFU" not in shown
    assert "power" not in inspected(store, 4)


def test_the_inspector_of_a_lost_rank_and_of_an_unknown_one() -> None:
    store = Store()
    store.apply(FakeRun().story(5))
    store.apply([Gone(3, clean=False, text="killed by signal 9", process="ended")])
    assert "✗ lost" in inspected(store, 3) and "killed by signal 9" in inspected(store, 3)
    assert "w selects the worst rank" in inspected(store, 99)
    store = _joined()
    assert "no step record yet" in inspected(store, 0)
    store.rank_records = False
    assert "low bandwidth: no records of single ranks" in inspected(store, 0)
    assert "yet" not in inspected(store, 0)


def _joined() -> Store:
    store = Store()
    store.apply(FakeRun().begin())
    return store


@pytest.mark.parametrize("width", [20, 34, 46, 74, 120])
def test_long_lines_of_the_inspector_wrap(width: int) -> None:
    lines = RankDetails(Selection(rank=517)).draw(large(), width, 60, COLOURS)
    assert any("straggler" in line for line in text(lines))
    wrapped = [line for line in text(lines) if line.startswith("  ")]
    assert width < 40 or all(len(line) <= width for line in wrapped)


def test_the_list_of_metrics_has_the_median_and_the_worst_of_each() -> None:
    store = large()
    store.apply(Vitals(rank, 19, throttle=["thermal"] if rank == 7 else []) for rank in range(16))
    lines = {
        metric.key: text([metric_line(store, metric, None, False, COLOURS)])[0].split()
        for metric in available(store)
    }
    assert lines["own"] == ["own", "time", "216", "ms", "311", "+42", "%", "r517", "!"]
    assert lines["throttle"] == ["throttle", "reasons", "0", "1", "r7", "!"]
    assert lines["bubble"][-2] == "to", "no end of the range is worse"
    assert lines["tokens"][-2:] == ["+0", "%"], "no rank is worse than the others"


def test_a_lost_rank_is_seen_in_a_cell_whose_other_half_is_a_slow_one() -> None:
    store = large()
    store.apply([Gone(549, clean=False, text="killed", process="ended")])
    metric = available(store)[0]
    readings = read(store, metric)
    layout = Plan(False, 1, 0, [], [Row("", "", [(517,), (0,)], [(549,), (1,)])])
    for rows in (layout.rows, [Row("", "", [(549,), (0,)], [(517,), (1,)])]):
        cells = Cells(metric, readings, levels_of(store, metric, readings), COLOURS, None, 4)
        assert text(cells.rows(replace(layout, rows=rows))) == ["✗▀"]


def test_drawing_again_with_another_cursor_equals_a_new_drawing() -> None:
    store = large()
    metric = available(store)[0]
    readings = read(store, metric)
    levels = levels_of(store, metric, readings)
    found, columns = bands({rank: store.state.hellos[rank].coords for rank in range(1024)}, "pp")
    again = Cells(metric, readings, levels, COLOURS, 0, 4)
    for width, height, cursor in ((60, 20, 0), (60, 20, 517), (120, 40, 517), (60, 20, 600), (60, 20, None)):
        how = plan(found, columns, width, height, 19)
        again.selected = cursor
        new = Cells(metric, readings, levels, COLOURS, cursor, 4)
        assert [line._parts for line in again.rows(how)] == [line._parts for line in new.rows(how)]


def test_steps_that_only_some_ranks_reported_share_a_column() -> None:
    store, run = Store(), FakeRun()
    store.apply(run.begin())
    for step in range(12):  # the even ranks report even steps, the odd ranks odd ones
        store.apply(one for one in run.step(step) if isinstance(one, Step) and one.rank % 2 == step % 2)
    lines = steps_drawn(store, Selection(), height=10)
    assert [len(line.split()[1]) for line in lines[:8]] == [6] * 8
    assert MISSING not in "".join(lines[:8]) and "worst of 2 steps" in lines[-1]
