"""Every screen shows names from a run as plain text, never as Textual markup or terminal escape codes."""

from pathlib import Path

import pytest

from agents.protocol import Estimate
from cockpit.knobs.preview import STABLE_S
from cockpit.tui.dialogs.starting import Starting
from cockpit.tui.widgets.panel import Panel
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import settle, shown
from tests.screens.hostile_run import TURN, HostileRun

PLAIN = ("demo[/x]", "fwd[/x]", "attn[qkv]", "dp[/x]", "1f[/]1b")


@pytest.mark.parametrize("size", [pytest.param((60, 20), marks=pytest.mark.exhaustive), (200, 60)])
async def test_every_panel_metric_and_grouping(
    make_cockpit: MakeCockpit, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cockpit = make_cockpit(HostileRun())
    seen: list[str] = []
    async with cockpit.app.run_test(size=size) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("z")
        for panel in list(cockpit.app.screen.query(Panel)):
            panel.focus()
            for key in ("m", "g", "m", "g", "m", "g") if panel.id == "ranks" else ("right",):
                await pilot.press(key)
                await pilot.pause()
                cockpit.app.refresh_from_store()
                await pilot.pause()
                seen += shown(cockpit.app)
        await pilot.press("s", "question_mark")  # a notification shows the name of the file
        await settle(cockpit, pilot)
        seen += shown(cockpit.app)
    text = "\n".join(seen)
    assert all(line.isprintable() for line in seen)
    assert [name for name in PLAIN if name not in text] == []


async def test_the_board_with_an_edit_and_its_preview(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(HostileRun())
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("k", "down", "down", "down", "right")
        cockpit.clock.now += STABLE_S
        await settle(cockpit, pilot)
        cockpit.source.answer(Estimate("[/q]", 1.0, 2.0, source=f"[/s]{TURN}"))
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
        await pilot.press("enter", "question_mark")
        await settle(cockpit, pilot)
        lines += shown(cockpit.app)
    assert all(line.isprintable() for line in lines)
    assert any("[@click=app.quit]lr 1→" in line for line in lines)
    assert any("[/q]" in line for line in lines)


class FakeEngine:
    pid, exit_status = 1, None

    def last_lines(self, count: int) -> list[str]:
        return [f"[/x] \x1b[31m {TURN}"] * count


async def test_hostile_output_of_a_starting_engine(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=0)
    cockpit.app.opening = Starting(FakeEngine())  # type: ignore[arg-type]
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        lines = shown(cockpit.app)
    assert all(line.isprintable() for line in lines)
    assert any("[/x]" in line for line in lines)


async def test_escape_does_not_stop_a_starting_run(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(steps=0)
    cockpit.app.opening = Starting(FakeEngine())  # type: ignore[arg-type]
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await settle(cockpit, pilot)
        await pilot.press("escape")
        await settle(cockpit, pilot)
        assert isinstance(cockpit.app.screen, Starting) and "q stops it" in "\n".join(shown(cockpit.app))
        await pilot.press("q")
        assert cockpit.app._exit
