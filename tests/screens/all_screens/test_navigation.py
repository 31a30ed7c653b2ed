"""Navigation on every screen: the prompt, the filter of ranks, moving between steps and between anomalies, freezing the
display."""

import pytest
from msgspec import structs
from textual.events import Key, MouseScrollDown

from agents.protocol import Alert, Experts, LayerLoad, Summary, Update
from cockpit.tui.dialogs.prompt import Prompt
from cockpit.tui.keys.general_bindings import SCREENS
from cockpit.tui.screens.run_screen import RunScreen
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown
from tests.screens.fake_run import FakeRun, big

PLAIN = {
    "=": "equals_sign",
    ">": "greater_than_sign",
    "<": "less_than_sign",
    "&": "ampersand",
    "*": "asterisk",
    ".": "full_stop",
    " ": "space",
}


def keys(text: str) -> list[str]:
    return [PLAIN.get(letter, letter) for letter in text]


def said(cockpit: Cockpit) -> list[str]:
    """The notifications on the screen."""
    return [one.message for one in cockpit.app._notifications]


async def test_a_narrow_prompt_shows_every_legal_word(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "slash")
        assert isinstance(prompt := cockpit.app.screen, Prompt)
        words = screen_text(cockpit).split()
        assert len(prompt._judged.words) > 10 and set(prompt._judged.words) <= set(words)
        await press(cockpit, pilot, "escape", "colon")
        assert "or a screen" in " ".join(screen_text(cockpit).split())


def name_of(cockpit: Cockpit) -> str:
    screen = cockpit.app.screen
    assert isinstance(screen, RunScreen)
    return screen.NAME


async def test_the_filter_counts_while_it_is_typed_and_holds_on_every_screen(
    make_cockpit: MakeCockpit,
) -> None:
    cockpit = make_cockpit(big(), steps=10, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "slash", *keys("pp=2 & ow"))
        assert "tab own_ms" in shown(cockpit.app)[-2]
        await press(cockpit, pilot, "tab", *keys(">"))
        assert shown(cockpit.app)[-1].startswith(" / pp=2 & own_ms>")
        await press(cockpit, pilot, *keys("1.2*median"))
        assert "0 of 1024" in shown(cockpit.app)[-1]
        await press(cockpit, pilot, *["backspace"] * 11, *keys("=x"))
        await press(cockpit, pilot, "enter")
        assert isinstance(cockpit.app.screen, Prompt), "an incomplete filter is not applied"
        error = " ".join(" ".join(shown(cockpit.app)[-8:-1]).split())
        assert "! 'x' is not expected at column 15; legal: a number, rank" in error
        await press(cockpit, pilot, *["backspace"] * 11, "enter")
        for screen in SCREENS:
            await press(cockpit, pilot, screen.keys)
            lines = shown(cockpit.app)
            assert "FILTER 128/1024" in lines[0] and lines[-2].rstrip().endswith("/ pp=2"), name_of(cockpit)
        await press(cockpit, pilot, "1")
        assert "╌" in screen_text(cockpit)
        await press(cockpit, pilot, "slash", "escape")
        assert "FILTER" not in screen_text(cockpit) and "╌" not in screen_text(cockpit)


async def test_text_that_arrives_in_one_piece_is_not_lost(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        driver = cockpit.app._driver
        assert driver
        for key in ("slash", *keys("rank=1")):
            character = {"slash": "/", "equals_sign": "="}.get(key, key)
            driver.process_message(Key(key, character))
        await settle(cockpit, pilot)
        assert "/ rank=1" in shown(cockpit.app)[-1]
        await press(cockpit, pilot, "slash", "colon", "apostrophe")
        assert "/ rank=1/:'" in shown(cockpit.app)[-1], "at the prompt, its own keys are text"


async def test_earlier_filters_return_with_the_arrow_keys(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(
            cockpit, pilot, "slash", *keys("tp=1"), "enter", "slash", "escape", "slash", "up", "enter"
        )
        assert "FILTER 4/8" in shown(cockpit.app)[0]
        assert " 1 Overview  2  3 " in shown(cockpit.app)[-2], "the tabs make room for the filter"


async def test_all_panels_about_ranks_follow_the_filter(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "2", "slash", *keys("pp=1"), "enter")
        lines = shown(cockpit.app)
        assert any("Rank 0 · outside the filter" in line for line in lines)
        assert [rank for rank in range(8) if any(line.startswith(f"│ r{rank} ") for line in lines)] == [
            4,
            5,
            6,
            7,
        ]
        await press(cockpit, pilot, "w")
        assert cockpit.app.session.selection.rank in (4, 5, 6, 7)
        await press(cockpit, pilot, "slash", *keys(" & rank<2"), "enter")
        assert "no rank here matches the filter" in screen_text(cockpit)


async def test_previous_and_next_step(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    selection = cockpit.app.session.selection
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "left_square_bracket", "left_square_bracket")
        assert selection.step == 17 and "AT STEP 17" in shown(cockpit.app)[0]
        cockpit.source.send(cockpit.run.step(20))
        await press(cockpit, pilot, "right_square_bracket", "right_square_bracket")
        assert selection.step == 19, "a selected step stays while the run goes on"
        await press(cockpit, pilot, "right_square_bracket")
        assert selection.step is None and "AT STEP" not in screen_text(cockpit)
        await press(cockpit, pilot, "colon", *keys("0"), "enter", "left_square_bracket")
        assert selection.step == 0
        await press(cockpit, pilot, "colon", *keys("last"), "enter")
        assert selection.step is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 5", ("ranks", 5, None, None, None)),
        ("expert 3.7", ("experts", 0, 3, 7, None)),
        ("curves", ("curves", 0, None, None, None)),
        ("12", ("overview", 0, None, None, 12)),
    ],
)
async def test_jumps(make_cockpit: MakeCockpit, text: str, expected: tuple[object, ...]) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    at = cockpit.app.session.selection
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "colon", *keys(text), "enter")
        assert (name_of(cockpit), at.rank, at.layer, at.expert, at.step) == expected


async def test_a_jump_to_nothing_says_what_is_legal(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        for text, why in (("rank 8", "there is no rank 8; legal: 0 to 7"), ("20", "the newest is 19")):
            await press(cockpit, pilot, "colon", *keys(text), "enter")
            assert why in shown(cockpit.app)[-2]
            await press(cockpit, pilot, "escape")


def trouble() -> FakeRun:
    return FakeRun(oversubscribed=False, straggler_alert=True)


def more_trouble(cockpit: Cockpit) -> list[Update]:
    """A run with a dead and a hot expert, a stalled rank, and a slow step."""
    layer = LayerLoad(2, [1000, 1000, 0, 1000, 1000, 1000, 1000, 6000], 0)
    slow = next(update for update in cockpit.run.step(20) if isinstance(update, Summary))
    return [
        Experts(19, [layer]),
        Alert("stall", "run", "error", True, 19, 0.0, "rank 6 is stalled", {}, [6]),
        structs.replace(slow, step_ms=900.0),
    ]


async def test_the_most_severe_anomaly_comes_first(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(trouble(), steps=20, change_at=None)
    at = cockpit.app.session.selection
    seen = []
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        cockpit.source.send(iter(more_trouble(cockpit)))
        for _ in range(5):
            await press(cockpit, pilot, "n")
            seen.append((name_of(cockpit), at.rank, at.layer, at.expert, at.step))
        assert seen == [
            ("ranks", 6, None, None, None),
            ("ranks", 3, None, None, None),
            ("experts", 3, 2, 2, None),
            ("experts", 3, 2, 7, None),
            ("pipeline", 3, 2, 7, 20),
        ]
        assert "5 of 5 · step 20 is the slowest of 21 with these knobs" in said(cockpit)[0]
        await press(cockpit, pilot, "n")
        assert said(cockpit) == ["✗ 1 of 5 · rank 6 is stalled"], "after the last, the first"
        assert (at.rank, at.step) == (6, None), "an alert concerns the newest step"
        await press(cockpit, pilot, "N", "N")
        assert name_of(cockpit) == "experts" and at.expert == 7


async def test_a_healthy_run_has_no_anomaly(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(oversubscribed=False, slow_rank=None), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "n")
        assert "no anomaly" in said(cockpit)[0] and name_of(cockpit) == "overview"


async def test_all_screens_draw_from_the_frozen_store(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(trouble(), steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        before = {}
        await press(cockpit, pilot, "space")
        for screen in SCREENS:
            await press(cockpit, pilot, screen.keys)
            before[screen.id] = shown(cockpit.app)[2:-2]
        for step in range(20, 40):
            cockpit.source.send(cockpit.run.step(step))
        cockpit.source.send(cockpit.run.change(40, micro_batches=8))
        cockpit.clock.now += 12.0
        for screen in SCREENS:
            await press(cockpit, pilot, screen.keys)
            lines = shown(cockpit.app)
            assert lines[2:-2] == before[screen.id], screen.id
            assert (
                "! FROZEN 12 s" in lines[0]
                and "20/300 steps" in lines[0]
                and "the run is at step 39" in lines[0]
            )
        await press(cockpit, pilot, "space")
        assert "FROZEN" not in screen_text(cockpit) and "40/300 steps" in screen_text(cockpit)


async def test_a_mark_is_set_at_the_selected_step_and_shown_on_curves(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(
            cockpit, pilot, "6", "colon", *keys("12"), "enter", "apostrophe", *keys("odd [x]"), "enter"
        )
        assert said(cockpit)[0].startswith(
            "mark 'a odd [x] at step 12 · the run's folder is not on this machine"
        )
        await press(cockpit, pilot, "e")
        assert "12 ⚑ 'a odd [x]" in screen_text(cockpit), "the list of marks on the curves' screen"
        await press(cockpit, pilot, "colon", *keys("last"), "enter", "colon", *keys("mark a"), "enter")
        assert cockpit.app.session.selection.step == 12


async def test_the_wheel_moves_the_cursor_and_a_double_click_opens(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=20, change_at=None)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot._post_mouse_events([MouseScrollDown], "#ranks")
        await settle(cockpit, pilot)
        assert cockpit.app.session.selection.rank == 2
        await pilot.click("#ranks", offset=(20, 5), times=2)
        await settle(cockpit, pilot)
        assert name_of(cockpit) == "ranks"
