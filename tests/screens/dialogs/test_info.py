"""The info screen: the settings of the run, and where its logs are."""

from pathlib import Path

import pytest

from agents.protocol import Gone
from cockpit.cli.main import run
from cockpit.tui.app import CockpitApp
from cockpit.tui.dialogs.info import InfoScreen
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, until
from tests.screens.fake_run import FakeRun
from tests.screens.hostile_run import HostileRun
from tests.screens.sizes import SIZES
from tests.unit.cockpit.cli.test_runs import GONE, record


def cockpit_in(folder: Path) -> Cockpit:
    cockpit = Cockpit(FakeRun(), 160, 100, True)
    cockpit.app = CockpitApp(cockpit.source, cockpit.store, refreshes_per_s=1, folder=folder)
    return cockpit


@pytest.mark.parametrize("size", SIZES)
async def test_settings_and_logs_within_three_keys(
    make_cockpit: MakeCockpit, tmp_path: Path, size: tuple[int, int]
) -> None:
    (tmp_path / "engine.log").write_text("line\n")
    (tmp_path / "layout.toml").write_text("[train]\nlr = 0.25\n")
    cockpit = cockpit_in(tmp_path)
    async with cockpit.app.run_test(size=size) as pilot:
        await press(cockpit, pilot, "i")
        await until(cockpit.app, pilot, lambda: cockpit.app.screen.panel._reader.files is not None)  # type: ignore[attr-defined]
        await press(cockpit, pilot, "pagedown")
        shown = screen_text(cockpit)
        assert "engine.log · 5 B" in shown.replace("\n", "") or size == (80, 24)
        await press(cockpit, pilot, "f", *"engine.log", "enter")
        assert "5 B" in screen_text(cockpit)
        await press(cockpit, pilot, "escape", "f", *"train.lr", "enter")
        assert "0.25" in screen_text(cockpit)
        await press(cockpit, pilot, "y")
        assert cockpit.app.clipboard == "0.25"
        await press(cockpit, pilot, "escape", "escape")
        assert not isinstance(cockpit.app.screen, InfoScreen)


async def test_every_line_of_a_hostile_run(make_cockpit: MakeCockpit) -> None:
    cockpit = make_cockpit(HostileRun())
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await press(cockpit, pilot, "i", *["pagedown"] * 3, "y", "w", "right", "G")
        assert isinstance(cockpit.app.screen, InfoScreen)
        assert all(line.isprintable() for line in screen_text(cockpit).splitlines())


def test_without_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path))
    record(tmp_path / "over", *GONE)
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "layout.toml").write_text("[train]\nlr = 0.25\n")
    assert run(["info", "over"]) == 0
    text = capsys.readouterr().out
    assert (
        "outcome\n  steps       5 of 30\n" in text
        and f"  replay  cockpit replay {tmp_path / 'over'}\n" in text
    )
    assert run(["info", "bare"]) == 0
    out, err = capsys.readouterr()
    assert "train.lr" in out and "cannot be read" in err
    assert run(["info", "none"]) == 2
    assert capsys.readouterr().err.startswith("there is no run none")


@pytest.mark.parametrize("size", SIZES)
async def test_the_overview_shows_the_outcome_of_a_run_that_has_ended(
    make_cockpit: MakeCockpit, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        await settle(cockpit, pilot)
        assert "160 of 300" not in screen_text(cockpit)
        turns = ["shift+tab"] * 4  # on a narrow screen, each press shows the previous panel
        await press(cockpit, pilot, *turns)
        assert "lowest" not in screen_text(cockpit)
        cockpit.source.send(Gone(rank, clean=True) for rank in range(8))
        await press(cockpit, pilot, *(["shift+tab"] if size == (80, 24) else []))
        assert "demo has ended" in screen_text(cockpit)
        assert "2.3111, lowest 2.2591 at step 155" in screen_text(cockpit)
