"""A simulated run is marked as such on every screen, even at the smallest size; other runs are not."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from msgspec import structs

from agents.protocol import Hello, Update
from cockpit.data.diagnosis.status import SIMULATED
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle, shown
from tests.screens.fake_run import FakeRun
from tests.screens.sizes import SIZES


@dataclass
class SimulatedRun(FakeRun):
    speed: float = 1.0

    def begin(self) -> Iterator[Update]:
        for update in super().begin():
            if isinstance(update, Hello):
                facts = update.facts | {"speed": self.speed}
                update = structs.replace(update, simulated=True, facts=facts)
            yield update


SCREENS = {
    "overview": (),
    "zoomed panel": ("z",),
    "knob board": ("k",),
    "help": ("question_mark",),
    "help of the board": ("k", "question_mark"),
}


@pytest.mark.parametrize("size", SIZES)
async def test_every_screen_shows_the_mark(make_cockpit: MakeCockpit, size: tuple[int, int]) -> None:
    cockpit = make_cockpit(SimulatedRun())
    async with cockpit.app.run_test(size=size) as pilot:
        for name, keys in SCREENS.items():
            await press(cockpit, pilot, *keys)
            assert SIMULATED in screen_text(cockpit), (name, screen_text(cockpit))
            await press(cockpit, pilot, *["escape"] * len(keys))


async def test_the_question_before_the_end_shows_the_mark(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(SimulatedRun())
    cockpit.source.owns_run = True  # type: ignore[misc]
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "q")
        assert "End the run?" in screen_text(cockpit) and SIMULATED in screen_text(cockpit)


async def test_the_mark_is_never_dropped_and_names_the_speed(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(SimulatedRun(speed=10.0))
    async with cockpit.app.run_test(size=(40, 12)) as pilot:
        await settle(cockpit, pilot)
        assert "SIMULATED x10" in shown(cockpit.app)[0]


@pytest.mark.parametrize("slow", [None, 2])
async def test_a_tiny_terminal_shows_the_short_mark_whole(
    make_cockpit: MakeCockpit, slow: int | None
) -> None:
    run = SimulatedRun(speed=10.0, slow_rank=slow, straggler_alert=slow is not None, oversubscribed=False)
    cockpit = make_cockpit(run)
    async with cockpit.app.run_test(size=(20, 5)) as pilot:
        await settle(cockpit, pilot)
        assert shown(cockpit.app)[0].rstrip().endswith("· SIM"), shown(cockpit.app)[0]


async def test_other_runs_have_no_mark(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(200, 60)) as pilot:
        await settle(cockpit, pilot)
        assert SIMULATED not in screen_text(cockpit)
