"""An action that ends the run asks for confirmation and states what is lost; an ended run accepts no changes."""

from collections.abc import Iterator

import pytest
from msgspec import structs
from textual.pilot import Pilot

from agents.protocol import CHECKPOINT_STEP, CommandState, Event, Gone, KnobState, Legal, Propose, Update
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.dialogs.ending import Ending
from cockpit.tui.screens.overview import Overview
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text
from tests.screens.fake_run import FakeRun

SAVE = KnobState("save", None, Legal([True]), True, "a checkpoint of the run", action=True)
STOP = KnobState("stop", None, Legal([True]), True, "end the run", action=True, ends=True)


class StoppableRun(FakeRun):
    def begin(self) -> Iterator[Update]:
        yield from super().begin()
        board = self.board()
        yield structs.replace(board, knobs=[STOP, *board.knobs, SAVE])

    def story(self, steps: int, change_at: int | None = None) -> Iterator[Update]:
        yield from super().story(steps, None)


def saved(step: int) -> Event:
    return Event(1.7e9, "info", "engine", f"checkpoint of step {step}", {CHECKPOINT_STEP: step})


def asks(cockpit: Cockpit) -> str:
    assert isinstance(cockpit.app.screen, Ending)
    return cockpit.app.screen.page.plain


async def to_stop(cockpit: Cockpit, pilot: Pilot[None]) -> None:
    """Move the cursor to `stop`, the last row: actions follow the knobs in the order of the board."""
    await press(cockpit, pilot, "k", "up", "up")


@pytest.mark.parametrize("size", [(60, 20), (120, 36)])
async def test_stop_states_the_lost_steps_and_is_confirmed(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit(StoppableRun())
    async with cockpit.app.run_test(size=size) as pilot:
        await to_stop(cockpit, pilot)
        assert "enter ends the run after a confirmation" in screen_text(cockpit)
        assert not any("stop" in line and "loss" in line for line in screen_text(cockpit).splitlines())
        await press(cockpit, pilot, "enter", "enter", "enter")
        assert isinstance(cockpit.app.screen, Ending) and cockpit.source.requests == []
        assert "demo has done 160 of 300 steps. It has no checkpoint: all steps would be lost." in asks(
            cockpit
        )
        cockpit.source.send(iter([saved(150)]))
        await press(cockpit, pilot)
        assert "of step 150: the 10 steps since then would be lost" in asks(cockpit)
        await press(cockpit, pilot, "escape", "enter", "n")
        assert isinstance(cockpit.app.screen, BoardScreen) and cockpit.source.requests == []
        await press(cockpit, pilot, "enter", "y")
        assert cockpit.source.proposed == [{"stop": True}]
        await press(cockpit, pilot, "enter", "s")
        assert cockpit.source.proposed[1:] == [{"stop": True, "save": True}], "both at one step boundary"


async def test_stop_among_other_edits_is_confirmed_too(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(StoppableRun())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "k", "right", "up", "up", "right", "enter")
        assert isinstance(cockpit.app.screen, Ending)
        await press(cockpit, pilot, "y")
        assert cockpit.source.proposed == [{"micro_batches": 8, "stop": True}]


async def test_an_ended_run_refuses_changes(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(StoppableRun())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        cockpit.source.send(Gone(rank, clean=True) for rank in range(8))
        for keys in (("k", "right", "enter"), ("escape", "up", "up", "enter"), ("ctrl+t",), ("ctrl+u",)):
            await press(cockpit, pilot, *keys)
            assert "the run is over: no knob can be changed" in screen_text(cockpit), keys
        assert cockpit.source.requests == [] and isinstance(cockpit.app.screen, BoardScreen)


async def test_quitting_ones_own_run_is_confirmed(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(StoppableRun())
    cockpit.source.owns_run = True
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "q")
        assert "all steps would be lost" in asks(cockpit)
        await press(cockpit, pilot, "escape")
        assert isinstance(cockpit.app.screen, Overview) and cockpit.app.is_running
        await press(cockpit, pilot, "q", "q")
    assert cockpit.source.stopped and cockpit.source.requests == []


async def test_quitting_with_a_checkpoint_waits_for_the_runs_end(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(StoppableRun())
    cockpit.source.owns_run = True
    async with cockpit.app.run_test(notifications=True, size=(120, 36)) as pilot:
        await press(cockpit, pilot, "q", "s")
        (ask,) = cockpit.source.requests
        assert isinstance(ask, Propose) and ask.changes == {"save": True, "stop": True}
        why = "save is not legal now"
        cockpit.source.send(iter([CommandState(ask.id, 0, "rejected", ask.changes, {}, "me", 1.0, why=why)]))
        await press(cockpit, pilot)
        assert screen_text(cockpit).count(f"the run continues: {why}") == 1
        assert cockpit.app.is_running
        await press(cockpit, pilot, "q", "s")
        assert cockpit.app.is_running
        cockpit.source.send(Gone(rank, clean=True) for rank in range(8))
        cockpit.app.refresh_from_store()
        await pilot.pause()
    assert cockpit.source.stopped and len(cockpit.source.requests) == 2


@pytest.mark.parametrize("over", [True, False])
async def test_quitting_an_ended_or_attached_run_needs_no_confirmation(
    make_cockpit: MakeCockpit, over: bool
) -> None:
    cockpit = make_cockpit(StoppableRun())
    cockpit.source.owns_run = over
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        if over:
            cockpit.source.send(Gone(rank, clean=True) for rank in range(8))
        await press(cockpit, pilot)
        await pilot.press("q")
    assert cockpit.source.stopped
