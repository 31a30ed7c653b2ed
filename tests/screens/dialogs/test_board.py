"""The knob board: choosing values, sending proposals, and feedback to the user."""

import pytest
from msgspec import structs

from agents.protocol import MOVED_ON, CommandState, KnobState, Legal, Propose
from agents.state.preview_checks import Check, check_event
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.screens.overview import Overview
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle


async def test_a_change_from_key_press_to_the_last_ack(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        await press(cockpit, pilot, "right")
        assert "enter proposes micro_batches 8→16 · loss-neutral" in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        assert cockpit.source.proposed == [{"micro_batches": 16}]
        assert "sent · waiting for the hub" in screen_text(cockpit)
        proposed = cockpit.source.requests[-1].id
        accepted = CommandState(
            proposed, 2, "accepted", {"micro_batches": 16}, {"micro_batches": 8}, "me@here", 1.0, world=8
        )
        cockpit.source.send(iter([accepted]))
        await settle(cockpit, pilot)
        assert "· accepted" in screen_text(cockpit)
        assert "0/8 waiting for a step boundary" in screen_text(cockpit)
        cockpit.source.send(iter([structs.replace(accepted, state="applied", acks=8, applied_step=161)]))
        await settle(cockpit, pilot)
        assert "✓ applied ████████████ 8/8 at step 161 · revision 2" in screen_text(cockpit)


async def test_a_refusal_is_shown_with_its_reason(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        await press(cockpit, pilot, "left", "enter")
        why = "the board has changed: revision 2, not 1"
        cockpit.source.send(
            iter(
                [
                    CommandState(
                        cockpit.source.requests[-1].id,
                        0,
                        "rejected",
                        {"micro_batches": 4},
                        {},
                        "me",
                        1.0,
                        why=why,
                    )
                ]
            )
        )
        await settle(cockpit, pilot)
        assert f"✗ rejected {why}" in screen_text(cockpit)


async def test_typing_a_value_and_several_at_once(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        await press(cockpit, pilot, "right", "down", "1", ".", "5")
        assert "capacity_factor none→1.5 · changes the loss" in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        assert cockpit.source.proposed == [{"micro_batches": 16, "capacity_factor": 1.5}]


async def test_an_illegal_value_is_refused_and_not_sent(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        await press(cockpit, pilot, "3", "enter")
        assert "micro_batches = 3 is not legal; legal: 2, 4, 8, 16" in screen_text(cockpit)
        assert cockpit.source.proposed == []
        # a letter goes into the typed value and triggers no action
        await press(cockpit, pilot, "backspace", "q", "escape")
        assert isinstance(cockpit.app.screen, BoardScreen)
        await press(cockpit, pilot, "enter")
        assert "nothing is edited" in screen_text(cockpit)
        await press(cockpit, pilot, "escape", "escape")
        assert isinstance(cockpit.app.screen, Overview)


async def test_a_viewer_sends_nothing_and_sees_how_to_become_operator(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(operator=False)
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        await press(cockpit, pilot, "right", "8", "enter")
        assert cockpit.source.proposed == []
        assert "to change the run: cockpit attach demo-0001 --operator" in screen_text(cockpit)
        assert "VIEWER" in screen_text(cockpit)


async def test_an_action_is_requested_and_holds_no_value(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        board = cockpit.app.store.state.board
        assert board
        save = KnobState("save", None, Legal([True]), True, "a snapshot of the run", action=True)
        place = KnobState(
            "expert_placement", None, Legal(["load", "traffic"]), True, "move experts", action=True
        )
        cockpit.source.send(iter([structs.replace(board, knobs=[*board.knobs, place, save])]))
        await press(cockpit, pilot, "up")
        assert "save (done once) · a snapshot" in screen_text(cockpit) and "enter requests it" in screen_text(
            cockpit
        )
        assert "none→true" not in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        assert cockpit.source.proposed == [{"save": True}]
        await press(cockpit, pilot, "up", "right")
        assert "enter proposes expert_placement load" in screen_text(
            cockpit
        ) and "expert_placement load · loss" not in screen_text(cockpit)
        assert "or try it" not in screen_text(cockpit)
        await press(cockpit, pilot, "ctrl+t")
        assert "! expert_placement is an action; only a knob can be tried" in screen_text(cockpit)
        await press(cockpit, pilot, "right", "enter")
        assert cockpit.source.proposed[-1] == {"expert_placement": "traffic"}
        done = CommandState(
            "place", 2, "applied", {"expert_placement": "traffic"}, {}, "me", 1.0, acks=8, world=8
        )
        cockpit.source.send(iter([structs.replace(done, applied_step=9)]))
        await settle(cockpit, pilot)
        assert "expert_placement=traffic · 8/8 at step 9" in screen_text(cockpit)


async def test_a_key_pressed_before_the_first_refresh_applies_to_this_run(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        board = BoardScreen(cockpit.source, cockpit.store)
        board.controller.next_value(1)
        board.controller.propose()
    assert cockpit.source.proposed == [{"micro_batches": 16}]


@pytest.mark.parametrize("operator", [True, False])
async def test_sixteen_knobs_and_actions_fit_in_80x24(make_cockpit: MakeCockpit, operator: bool) -> None:
    cockpit = make_cockpit(operator=operator)
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot)
        board = cockpit.store.state.board
        assert board
        long = (
            "what it does, in a sentence that is longer than one line of a small terminal, and then some END"
        )
        names = [f"some_knob_{n}" for n in range(5)]
        knobs = [KnobState(name, 1, Legal([1, 2]), True, long) for name in names]
        names += ["expert_placement", "save", "pause", "resume", "stop", "profile", "profile_rank"]
        knobs += [KnobState(name, None, Legal([True]), True, long, action=True) for name in names[5:]]
        cockpit.source.send(iter([structs.replace(board, knobs=[*board.knobs, *knobs])]))
        await press(cockpit, pilot, "k", "up")
        words = screen_text(cockpit).split()
        assert [name for name in (*cockpit.run.knobs, *names) if name not in words] == []
        assert "END" in words, "the explanation is complete"
        footer = screen_text(cockpit).splitlines()[-1]
        assert ("propose" in footer, "try" in footer, "undo" in footer) == (operator, operator, operator)
        assert "help" in footer and "close" in footer


async def test_a_change_of_someone_else_is_named_before_proposing_on_top(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right")
        cockpit.source.send(cockpit.run.change(160, "c2", lr_scale=0.5))
        await press(cockpit, pilot, "enter")
        assert cockpit.source.proposed == []
        assert "! ada@login set lr_scale 0.5 (r2); press enter again to propose anyway" in screen_text(
            cockpit
        )
        await press(cockpit, pilot, "right", "enter")  # after another key in between, the board asks again
        assert cockpit.source.proposed == [] and "press enter again" in screen_text(cockpit)
        cockpit.source.send(cockpit.run.change(161, "c3", recompute="full"))
        await press(cockpit, pilot, "enter")  # after one more change, too
        assert cockpit.source.proposed == [] and "recompute full (r3); press enter" in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        (sent,) = cockpit.source.requests
        assert isinstance(sent, Propose) and (sent.changes, sent.base_revision) == ({"micro_batches": 16}, 3)


async def test_a_stale_proposal_becomes_edits_again(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "right", "enter")
        sent = cockpit.source.requests[-1].id
        why = f"{MOVED_ON}: revision 2, not 1"
        cockpit.source.send(
            iter([CommandState(sent, 0, "rejected", {"micro_batches": 16}, {}, "me", 1.0, why=why)])
        )
        await settle(cockpit, pilot)
        assert f"✗ rejected {why}" in screen_text(cockpit), "the other change is not known yet"
        cockpit.source.send(cockpit.run.change(160, "c2", lr_scale=0.5))
        await settle(cockpit, pilot)
        assert "ada@login set lr_scale 0.5 (r2); press enter again" in screen_text(cockpit)
        await press(cockpit, pilot, "enter")
        again = cockpit.source.requests[-1]
        assert isinstance(again, Propose) and again.id != sent
        assert (again.changes, again.base_revision) == ({"micro_batches": 16}, 2)


async def test_the_board_says_that_the_hub_is_silent(make_cockpit: MakeCockpit) -> None:
    """On a terminal of 80 columns, the knob board covers the status lines, so the knob board itself must show that no
    messages arrive from the hub."""
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "k")
        assert "STALE" not in screen_text(cockpit)
        for age_s in (12.0, 15.0):
            with cockpit.app.store.lock:
                cockpit.app.store.set_message_age(age_s)
            await settle(cockpit, pilot)
            assert f"Knobs · revision 1 · STALE {age_s:.0f} s" in screen_text(cockpit)
        await press(cockpit, pilot, "right", "enter")
        assert "! no message from the hub: it gets the request when it is back" in screen_text(cockpit)
        with cockpit.app.store.lock:
            cockpit.app.store.set_message_age(0.1)
        await settle(cockpit, pilot)
        assert "STALE" not in screen_text(cockpit) and "sent · waiting for the hub" in screen_text(cockpit)


async def test_u_undoes_on_the_board_unless_a_value_is_typed(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k", "u")
        assert "press again to revert revision 1: micro_batches 8→4" in screen_text(cockpit)
        await press(cockpit, pilot, "u")
        assert isinstance(undo := cockpit.source.requests[-1], Propose) and undo.undo
        await press(cockpit, pilot, "down", "down", "f", "u", "l", "l", "enter")
        assert cockpit.source.proposed[-1] == {"recompute": "full"}


async def test_a_change_shows_its_effect_beside_its_prediction(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, "k")
        line = next(line for line in screen_text(cockpit).splitlines() if "effect" in line)
        assert "step time 413 → 657 ms (+58.9 %)" in line and "predicted" not in line
        checks = [Check("step_ms", 412.0, 500.0, 480.0, 520.0, 655.0)]
        cockpit.source.send(iter([check_event(1.0, 1, {"micro_batches": (4, 8)}, checks)]))
        await settle(cockpit, pilot)
        assert "! effect step time 412 → 655 ms (+59.0 %), predicted 480 .. 520 ms: outside" in screen_text(
            cockpit
        )
