"""The knob board: previews of edits, trials and undo."""

import pytest
from textual.pilot import Pilot

from agents.protocol import CommandState, Decide, Estimate, Preview, Propose, Try
from cockpit.knobs.preview import ANSWER_TIMEOUT_S, GAP_S, REPEAT_S, STABLE_S
from cockpit.knobs.values import TRIAL_STEPS
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.dialogs.help import Help
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle
from tests.screens.fake_run import FakeRun
from tests.screens.sizes import SIZES

FASTER = Estimate("step_ms", 655.0, 603.0, 588.0, 621.0, "measured in this run: 24 steps with these values")
SAME = Estimate("a2a_bytes", 12.6e6, 12.6e6, source="not affected by micro_batches")
UNKNOWN = Estimate("memory_bytes", 3e8, source="no data: this run had no step with these values")


async def later(cockpit: Cockpit, pilot: Pilot[None], seconds: float = STABLE_S) -> None:
    cockpit.clock.now += seconds
    await settle(cockpit, pilot)


# ---------------------------------------------------------------------------------------------- preview


@pytest.mark.parametrize("size", SIZES)
async def test_edits_are_previewed_and_the_answer_is_shown(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "k", "right")
        assert cockpit.source.queries == [], "the user may still be choosing another value"
        await later(cockpit, pilot)
        assert [question.changes for question in cockpit.source.queries] == [{"micro_batches": 16}]
        assert "· waiting for the run's preview" in screen_text(cockpit)
        cockpit.source.answer(FASTER, SAME, UNKNOWN)
        await settle(cockpit, pilot)
        screen = screen_text(cockpit)
        assert "Preview · loss-neutral" in screen
        row = next(line for line in screen.splitlines() if "step time  " in line)
        assert "655 → 588 .. 621 ms (603)" in row and "measured in this ru" in row
        assert any(
            "no data" in line and "memory · this run had no step" in line for line in screen.splitlines()
        )
        assert any("as now" in line and "all-to-all · not affected" in line for line in screen.splitlines())
        await press(cockpit, pilot, "escape")
        assert "Preview" not in screen_text(cockpit)


async def test_an_answer_is_never_shown_for_other_edits(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        await later(cockpit, pilot)
        await press(cockpit, pilot, "left", "left")
        cockpit.source.answer(FASTER)  # this answers the query for 16, but the edit is now 4
        await settle(cockpit, pilot)
        assert "603" not in screen_text(cockpit)
        await later(cockpit, pilot, GAP_S)
        assert cockpit.source.queries[-1].changes == {"micro_batches": 4}
        cockpit.source.answer(FASTER, number=0)
        await settle(cockpit, pilot)
        assert "603" not in screen_text(cockpit)
        cockpit.source.answer(FASTER)
        await settle(cockpit, pilot)
        assert "655 → 588 .. 621 ms (603)" in screen_text(cockpit)
        # after a change of the board, the old estimates are no longer valid
        cockpit.source.send(cockpit.run.change(160, recompute="full"))
        await settle(cockpit, pilot)
        assert "603" not in screen_text(cockpit)


async def test_queries_are_rate_limited_whatever_is_pressed(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "down", "down", "down")
        for letter in "1.25":
            await press(cockpit, pilot, letter)
            await later(cockpit, pilot, STABLE_S)
            if letter == ".":
                assert "enter proposes lr_scale" not in screen_text(cockpit), "1 is the current value"
        proposed = [one.changes["lr_scale"] for one in cockpit.source.queries]
        assert proposed == [1.2], "1 is not a change, and 1.25 is chosen within half a second"
        await later(cockpit, pilot, GAP_S - STABLE_S)
        assert [one.changes["lr_scale"] for one in cockpit.source.queries] == [1.2, 1.25]
        cockpit.source.answer(FASTER, neutral=False)
        await settle(cockpit, pilot)
        assert "Preview · changes the loss" in screen_text(cockpit)
        await later(cockpit, pilot, REPEAT_S)
        assert len(cockpit.source.queries) == 3, "the run has continued in the meantime"
        assert "655 → 588 .. 621 ms (603)" in screen_text(cockpit), (
            "the answer stays until a newer one arrives"
        )


async def test_no_answer_a_refusal_and_a_denial_are_shown(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        await later(cockpit, pilot)
        await later(cockpit, pilot, ANSWER_TIMEOUT_S)
        assert "no preview answer within 5 s" in screen_text(cockpit)
        cockpit.source.answer(why="recompute = full does not go with it")
        await settle(cockpit, pilot)
        assert "✗ recompute = full does not go with it" in screen_text(cockpit)
        await press(cockpit, pilot, "left", "left")
        await later(cockpit, pilot, GAP_S)
        cockpit.source.deny(cockpit.source.queries[-1].id, "the key watch is no longer in force")
        await settle(cockpit, pilot)
        assert "· the key watch is no longer in force" in screen_text(cockpit)


async def test_a_run_without_previews_gets_no_query(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(FakeRun(previews=False))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        await later(cockpit, pilot)
        assert screen_text(cockpit).count("· this run does not support previews") == 1
        assert cockpit.source.queries == []
        await press(cockpit, pilot, "enter")
        assert cockpit.source.proposed == [{"micro_batches": 16}]


async def test_a_viewer_sees_a_preview_and_changes_nothing(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(operator=False)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        await later(cockpit, pilot)
        assert "preview only: micro_batches 8→16" in screen_text(cockpit)
        cockpit.source.answer(FASTER)
        await settle(cockpit, pilot)
        assert "655 → 588 .. 621 ms (603)" in screen_text(cockpit)
        cockpit.source.send(iter([cockpit.run.trial("t", "after", 16, measured=12)]))
        for key in ("enter", "ctrl+t", "ctrl+u", "ctrl+u", "ctrl+k", "ctrl+r"):
            await press(cockpit, pilot, "down", key)
            assert "to change the run: cockpit attach demo-0001 --operator" in screen_text(cockpit), key
        assert cockpit.source.requests == []
        assert "after █████▋░░░░░░░░ 12/30" in screen_text(cockpit)


# ------------------------------------------------------------------------------------------------ trials


async def test_a_trial_from_key_press_to_outcome(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        assert "^k keep" not in screen_text(cockpit)
        await press(cockpit, pilot, "ctrl+t")
        (ask,) = cockpit.source.requests
        assert isinstance(ask, Try) and (ask.changes, ask.steps) == ({"micro_batches": 16}, TRIAL_STEPS)
        assert "sent · waiting for the hub" in screen_text(cockpit)
        cockpit.source.send(iter([cockpit.run.trial(ask.id, "before", 16, measured=12)]))
        await settle(cockpit, pilot)
        screen = screen_text(cockpit)
        assert "Trial · micro_batches 8→16" in screen and "before █████▋░░░░░░░░ 12/30" in screen
        assert "^k keep" in screen and "^r end trial" in screen
        cockpit.source.send(iter([cockpit.run.trial(ask.id, "after", 16, measured=3, before_ms=655.0)]))
        await settle(cockpit, pilot)
        assert "30/30  655 ms" in screen_text(cockpit) and " 3/30" in screen_text(cockpit)
        found = {"before_ms": 655.0, "after_ms": 601.0, "ratio": 0.918, "low": 0.9, "high": 0.938}
        why = "it is clearly faster"
        cockpit.source.send(iter([cockpit.run.trial(ask.id, "kept", 16, measured=30, why=why, **found)]))
        await settle(cockpit, pilot)
        assert "✓ kept · step time -8.2 % (95 %: -10.0 % to -6.2 %) · it is clearly faster" in screen_text(
            cockpit
        )
        assert "^k keep" not in screen_text(cockpit)


@pytest.mark.parametrize(("key", "keep"), [("ctrl+k", True), ("ctrl+r", False)])
async def test_a_trial_of_another_operator_is_shown_and_ended(
    make_cockpit: MakeCockpit, key: str, keep: bool
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        cockpit.source.send(iter([cockpit.run.trial("t", "after", 16, measured=12, loss_neutral=False)]))
        await settle(cockpit, pilot)
        assert "trial micro_batches 8→16 (after 12/30)" in screen_text(cockpit), "in the first status line"
        await press(cockpit, pilot, "k")
        assert "by bob@login" in screen_text(cockpit)
        assert "it changes the loss, so it is reverted unless an operator keeps it" in screen_text(cockpit)
        await press(cockpit, pilot, key)
        (word,) = cockpit.source.requests
        assert isinstance(word, Decide) and (word.id, word.keep) == ("t", keep)
        assert ("sent: keep the value" if keep else "sent: end the trial") in screen_text(cockpit)
        state, why = ("kept", "kept by me") if keep else ("reverting", "ended by me")
        cockpit.source.send(iter([cockpit.run.trial("t", state, 16, why=why)]))
        await settle(cockpit, pilot)
        assert ("✓ kept · kept by me" if keep else "reverting: ended by me") in screen_text(cockpit)
        assert "sent: " not in screen_text(cockpit)


async def test_a_knob_on_trial_is_named_in_the_panel(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        cockpit.source.send(iter([cockpit.run.trial("t", "after", 16, measured=12)]))
        await press(cockpit, pilot, "shift+tab")
        assert any(
            "micro_batches" in line and "trial 12/30" in line for line in screen_text(cockpit).split("\n")
        )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (("ctrl+t",), "nothing is edited"),
        (("right", "down", "1", "ctrl+t"), "a trial changes one knob, and 2 are edited"),
        (("ctrl+t", "down", "1", "x", "ctrl+t"), "capacity_factor = 1x is not legal"),
        (("ctrl+k",), "no trial is running"),
    ],
)
async def test_an_impossible_trial_is_refused_with_one_sentence(
    make_cockpit: MakeCockpit, keys: tuple[str, ...], why: str
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", *keys)
        if keys == ("ctrl+k",):
            assert isinstance(cockpit.app.screen, BoardScreen)
            # as if the user pressed a key that the footer still shows
            cockpit.app.screen.controller.end_trial(True)
            await settle(cockpit, pilot)
        assert f"! {why}" in screen_text(cockpit)
        assert cockpit.source.requests == []


async def test_a_second_trial_is_refused_here_and_by_the_hub(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right", "ctrl+t")
        ask = cockpit.source.requests[0].id
        why = "another trial is running, by bob@login"
        other = cockpit.run.trial("other", "before", 4, measured=2)
        cockpit.source.send(iter([other, cockpit.run.trial(ask, "failed", 16, why=why)]))
        await settle(cockpit, pilot)
        assert f"✗ no trial: {why}" in screen_text(cockpit) and "Trial · micro_batches 8→4" in screen_text(
            cockpit
        )
        await press(cockpit, pilot, "right", "ctrl+t")
        assert f"! {why}" in screen_text(cockpit) and len(cockpit.source.requests) == 1
        await press(cockpit, pilot, "ctrl+k")
        assert "the trial has not changed the knob yet, so there is nothing to keep" in screen_text(cockpit)


# -------------------------------------------------------------------------------------------------- undo


async def test_an_undo_names_its_change_and_needs_a_second_press(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        assert "undo reverts this" in screen_text(cockpit)
        await press(cockpit, pilot, "ctrl+u")
        assert "press again to revert revision 1: micro_batches 8→4" in screen_text(cockpit)
        await press(cockpit, pilot, "down", "ctrl+u")
        assert cockpit.source.requests == [], "another key between the two presses cancels the first"
        cockpit.source.send(cockpit.run.change(160, "c2", recompute="full"))
        await press(cockpit, pilot, "ctrl+u")
        assert "press again to revert revision 2: recompute full→none" in screen_text(cockpit), (
            "another operator was faster"
        )
        await press(cockpit, pilot, "ctrl+u")
        (ask,) = cockpit.source.requests
        assert isinstance(ask, Propose) and (ask.undo, ask.changes, ask.base_revision) == (True, {}, 2)
        done = CommandState(ask.id, 3, "applied", {"recompute": "none"}, {"recompute": "full"}, "me", 1e10)
        done = CommandState(
            *[getattr(done, name) for name in done.__struct_fields__[:7]], 8, 8, 170, undoes=2
        )
        cockpit.source.send(iter([done]))
        await settle(cockpit, pilot)
        assert "✓ applied ████████████ 8/8 at step 170 · revision 3, which reverts 2" in screen_text(cockpit)
        await press(cockpit, pilot, "ctrl+u")
        assert "press again to revert revision 1: micro_batches 8→4" in screen_text(cockpit)


async def test_nothing_to_undo(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(change_at=None)
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "k", "ctrl+u", "ctrl+u")
        assert "there is no change to undo" in screen_text(cockpit) and cockpit.source.requests == []


async def test_a_refusal_of_the_hub_is_shown(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right", "enter")
        cockpit.source.deny(cockpit.source.requests[0].id, "the key watch has the role viewer")
        await settle(cockpit, pilot)
        assert "✗ refused the key watch has the role viewer" in screen_text(cockpit)


async def test_help_on_the_board_has_its_keys(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 60)) as pilot:
        await press(cockpit, pilot, "k", "question_mark")
        assert isinstance(cockpit.app.screen, Help)
        for key in ("ctrl+t", "ctrl+k", "ctrl+r", "u ctrl+u"):
            assert f"  {key}" in screen_text(cockpit)
        await press(cockpit, pilot, "escape")
        assert isinstance(cockpit.app.screen, BoardScreen)
        assert not any(isinstance(request, Preview) for request in cockpit.source.requests)
