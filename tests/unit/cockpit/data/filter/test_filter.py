"""The filter language: which ranks match, the error messages for invalid filters, and the effect of missing values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.protocol import Alert, Gone, Vitals
from cockpit.data.filter import FilterError, completions, count_text, matches, matching, parse, vocabulary
from cockpit.data.filter.matching import text_matches
from cockpit.data.metrics import OWN_TIME, read
from cockpit.data.ranks.rank_levels import levels_of
from cockpit.data.store import Store
from cockpit.tui.drawing.strips import StripLine
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.ranks.arrangement import bands, plan
from cockpit.tui.widgets.ranks.cells import FILTERED, Cells
from tests.screens.fake_run import FakeRun
from tests.screens.hostile_run import HostileRun

ALL = set(range(8))


def filled(run: FakeRun | None = None) -> Store:
    store = Store()
    store.apply((run or FakeRun()).story(6))
    return store


STORE = filled()


def ranks(store: Store, text: str) -> set[int]:
    found = matching(store, parse(text, vocabulary(store)))
    assert found is not None
    return set(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp=1", {4, 5, 6, 7}),
        ("pp == 1 & tp != 0", {5, 7}),
        ("pp=1 | tp=0 & dp=0", {0, 4, 5, 6, 7}),
        ("(pp=1 | tp=0) & dp=0", {0, 4, 5}),
        ("!(pp=1 | tp=0)", {1, 3}),
        ("!!rank>5", {6, 7}),
        ("own_ms > 1.2 * median", {3}),
        ("1.2 * median < own_ms", {3}),
        ("own_ms > 1.2 * peers & pp=0", {3}),
        ("own_ms = max", {3}),
        ("own_ms > median(own_ms) + 80 - 2 / 2", {3}),
        ("forward_ms > 1.2*median | backward_ms < -1", {3}),
        ("step_ms < 0.2k", set()),
        ("step_ms > 1e-9M", ALL),
        ("rank >= 2 & rank <= 3 & step = 5", {2, 3}),
        ("ep > rank", set()),
        ("host=no*0 & rank<2", {0, 1}),
        ('node!="node0"', set()),
        ("own_ms / 0 > 1", set()),
    ],
)
def test_ranks_that_match(text: str, expected: set[int]) -> None:
    assert ranks(filled(), text) == expected


def test_a_rank_without_a_value_matches_neither_a_comparison_nor_its_negation() -> None:
    store = filled()
    store.apply([Vitals(1, 5, power_w=690.0), Vitals(2, 5, power_w=0.0)])
    assert ranks(store, "power_w > 300") == {1}
    assert ranks(store, "!(power_w > 300)") == {2}
    assert ranks(store, "power_w != 300") == {1, 2}
    assert ranks(store, "power_w < median") == {2}  # the median of 0 and 690 W is the higher value
    assert ranks(store, "power_w > 300 | pp=1") == {1, 4, 5, 6, 7}
    assert ranks(store, "!(power_w > 300 & pp=1)") == {0, 1, 2, 3}  # pp=0 decides, whatever the power is
    found = matches(store, parse("power_w > 300", vocabulary(store)))
    assert count_text(store, found) == "1 of 8 · 6 without data"


def test_at_a_selected_step_its_values_count() -> None:
    store = filled(FakeRun(slow_rank=None))
    run = FakeRun(slow_rank=6)
    store.apply(run.step(6))
    store.apply(FakeRun(slow_rank=None).step(7))
    chosen = parse("own_ms > 1.2 * median", vocabulary(store))
    assert [matching(store, chosen, step) for step in (6, None, 6, 99)] == [{6}, set(), {6}, set()]


def test_flags_follow_alerts_and_lost_ranks() -> None:
    store = filled()
    chosen = parse("alert | lost | slow", vocabulary(store))
    assert matching(store, chosen) == frozenset()
    store.apply([Alert("straggler", "rank 6", "warning", True, 5, 0.0, "slow", {}, [6])])
    store.apply([Gone(2, clean=False, text="lost", process="ended"), Gone(3, clean=True)])
    assert matching(store, chosen) == {2, 6}, "the result is not from before the alert"
    assert [ranks(store, flag) for flag in ("alert", "lost", "slow")] == [{6}, {2}, {6}]
    assert ranks(store, "lost & own_ms > 0") == set(), "a lost rank has no number"


@pytest.mark.parametrize(
    ("text", "at", "part"),
    [
        ("", 0, "the filter is incomplete at column 1; legal: rank, step, pp, dp, tp, ep, own_ms"),
        ("own > 3", 0, "'own' is not expected at column 1; legal: rank, step"),
        ("pp=1 &", 6, "host, node, alert, lost, slow"),
        ("pp", 2, "legal: =, !=, <, <=, >, >=, +, -, *, /"),
        ("host<3", 4, "'<' is not expected at column 5; legal: =, !="),
        ("alert=3", 5, "'=' is not expected at column 6; legal: &, |"),
        ("(pp=1", 5, "legal: ), &, |"),
        ("pp=1) ", 4, "')' is not expected"),
        ("1 < 2", 0, "a comparison needs the name of at least one number"),
        ("own_ms > step_ms * median", 19, "legal: median(own_ms), median(step_ms)"),
        ("step_ms > 1e999", 10, "1e999 is too large"),
        ("\x1b[31m", 0, "' ' is not expected"),
        ("(" * 400, 32, "more than 32 nested"),
        ("!" * 400, 32, "more than 32 nested"),
        ("p" * 501, 500, "at most 500 characters"),
    ],
)
def test_a_wrong_text_gets_one_sentence(text: str, at: int, part: str) -> None:
    with pytest.raises(FilterError) as caught:
        parse(text, vocabulary(filled()))
    sentence = str(caught.value)
    assert part in sentence and caught.value.at == at and sentence.isprintable()


@given(st.text(alphabet='pown_ms3.(!&|<=>*-+/"* kM\x1b€٣', max_size=60) | st.text(max_size=20))
def test_any_text_is_a_filter_or_gets_a_sentence(text: str) -> None:
    store = STORE  # one store for all examples
    try:
        found = matching(store, parse(text, vocabulary(store)))
    except FilterError as error:
        assert 0 <= error.at <= len(text) and str(error).isprintable()
    else:
        assert found is not None and found <= ALL
    completions(text, vocabulary(store))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pp=1 & ow", ["own_ms"]),
        ("own_ms > 1.2 * me", ["memory_mib", "median"]),
        ("own_ms > median(ow", ["own_ms"]),
        ("pp=1 ", ["&", "|"]),
        ("ho", ["host"]),
        ("pp=1 x", []),
        ("??? p", []),
    ],
)
def test_completions(text: str, expected: list[str]) -> None:
    found = completions(text, vocabulary(STORE))
    assert [name for name in found if not name.startswith("median_")] == expected


def test_wildcards_need_linear_time() -> None:
    assert text_matches("n*-*4", "node-rack-4") and not text_matches("n*-*4", "node-rack-5")
    assert text_matches("*", "") and not text_matches("aa*aa", "aaa")
    assert not text_matches("*a" * 200 + "*b", "a" * 4096)


def test_names_of_a_hostile_run_are_identifiers() -> None:
    names = vocabulary(filled(HostileRun())).numbers
    assert all(name.isidentifier() and name.isascii() for name in names)
    assert "dp__x_" in names


def test_the_grid_dims_ranks_that_do_not_match() -> None:
    """A cell that stands for several ranks shows the worst of the ranks that match the filter; a cell without a match
    is shaded."""
    store = filled(FakeRun(oversubscribed=False))
    readings = read(store, OWN_TIME)
    levels = levels_of(store, OWN_TIME, readings)
    coords = {rank: hello.coords for rank, hello in store.state.hellos.items()}
    found, columns = bands(coords, "pp")
    drawn = {}
    for text in ("rank>=0", "rank=3", "rank=2"):
        chosen = matching(store, parse(text, vocabulary(store)))
        cells = Cells(OWN_TIME, readings, levels, palette("cockpit-dark"), None, 1, chosen)
        rows: list[StripLine] = cells.rows(plan(found, columns, 80, 20, 19))
        drawn[text] = "\n".join("".join(part for part, _ in row._parts) for row in rows)
    assert FILTERED not in drawn["rank>=0"]
    assert [drawn[text].count(FILTERED) for text in ("rank=3", "rank=2")] == [7, 7]
    assert "!" in drawn["rank=3"] and "!" not in drawn["rank=2"]
