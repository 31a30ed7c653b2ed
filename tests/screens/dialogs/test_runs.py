"""The runs dialog: filtering the list, opening another run, and marking runs for a comparison."""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from cockpit.data.run_folders import run_list
from cockpit.data.run_folders.next_run import NextRun
from cockpit.data.store import Store
from cockpit.tui import open as opening
from cockpit.tui.dialogs.ending import Ending
from cockpit.tui.dialogs.runs import RunsScreen
from tests.screens.conftest import Cockpit, MakeCockpit
from tests.screens.driver import press, screen_text, settle, until
from tests.screens.sizes import SIZES
from tests.unit.cockpit.cli.test_runs import GONE, record, write_hub


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three ended runs, one of them simulated, a run on another machine, and a folder that cannot be read."""
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "runs"))
    for name in ("alpha", "beta", "simulated"):
        record(tmp_path / "runs" / name, *GONE, simulated=name == "simulated")
    write_hub(tmp_path / "runs" / "elsewhere", 1, host="n3")
    (tmp_path / "runs" / "[b]broken[i]").mkdir()
    (tmp_path / "runs" / "[b]broken[i]" / "run.db").write_bytes(b"x" * 5000)
    return tmp_path / "runs"


async def list_runs(cockpit: Cockpit, pilot: Pilot[None]) -> RunsScreen:
    await press(cockpit, pilot, "R")
    screen = cockpit.app.screen
    assert isinstance(screen, RunsScreen)
    await until(cockpit.app, pilot, lambda: screen.reader.found is not None)
    await settle(cockpit, pilot)
    return screen


async def choose(cockpit: Cockpit, pilot: Pilot[None], name: str) -> None:
    """Filter by a name, and press Enter on the first run of the list."""
    await press(cockpit, pilot, "f", *name, "enter", "enter")


@pytest.mark.parametrize("size", SIZES)
async def test_lists_the_runs_and_says_why_one_cannot_be_opened(
    make_cockpit: MakeCockpit, runs: Path, size: tuple[int, int]
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=size) as pilot:
        await list_runs(cockpit, pilot)
        text = screen_text(cockpit)
        assert "ended" in text and "alpha" in text and "5/30" in text and "[b]broken[i]" in text
        assert "simulated SIMULATED" in text
        await press(cockpit, pilot, "f", *"[b]")
        found = " ".join(screen_text(cockpit).replace("│", " ").split())
        assert "alpha" not in found and "unreadable" in found and "has nothing to show" in found
        await press(cockpit, pilot, "enter", "enter")
        assert "has nothing to show" in screen_text(cockpit)
        await press(cockpit, pilot, "escape", "escape")
        assert not isinstance(cockpit.app.screen, RunsScreen) and cockpit.app.next_run is None


async def test_enter_ends_this_screen_and_names_the_next_run(make_cockpit: MakeCockpit, runs: Path) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        screen = await list_runs(cockpit, pilot)
        await press(cockpit, pilot, "f", *"elsewhere", "enter", "enter")
        await until(cockpit.app, pilot, lambda: "runs on n3 and listens only there" in screen.table.message)
        assert "runs on n3" in screen_text(cockpit)
        assert cockpit.app.next_run is None and not cockpit.app._exit
        await press(cockpit, pilot, "escape")
        await choose(cockpit, pilot, "beta")
        await until(cockpit.app, pilot, lambda: cockpit.app._exit)
    assert cockpit.app.next_run == NextRun(runs / "beta", live=False)


@pytest.mark.parametrize("answer", ["y", "n"])
async def test_asks_before_it_ends_a_run_of_this_cockpit(
    make_cockpit: MakeCockpit, runs: Path, answer: str
) -> None:
    cockpit = make_cockpit()
    cockpit.source.owns_run = True
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await list_runs(cockpit, pilot)
        await choose(cockpit, pilot, "alpha")
        await until(cockpit.app, pilot, lambda: isinstance(cockpit.app.screen, Ending))
        assert not cockpit.app._exit
        await press(cockpit, pilot, answer)
        await settle(cockpit, pilot)
        assert cockpit.app._exit is (answer == "y")
    assert cockpit.app.next_run == (NextRun(runs / "alpha", live=False) if answer == "y" else None)


async def test_marked_runs_are_compared_on_the_curves(make_cockpit: MakeCockpit, runs: Path) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await list_runs(cockpit, pilot)
        await press(cockpit, pilot, "f", *"elsewhere", "enter", "c")
        assert "can be read only on n3" in screen_text(cockpit)
        await press(cockpit, pilot, "escape")
        for name in ("alpha", "elsewhere", "simulated"):
            await press(cockpit, pilot, "f", *name, "enter", "space")
            if name == "elsewhere":
                assert "can be read only on n3" in screen_text(cockpit)
            await press(cockpit, pilot, "escape")
        assert "2 marked · 5 runs" in screen_text(cockpit)
        await press(cockpit, pilot, "c")
        assert cockpit.app.screen.NAME == "curves"  # type: ignore[attr-defined]
        others = cockpit.app.session.comparison
        await until(cockpit.app, pilot, lambda: len(others.others) == 2)
        assert {one.folder for one in others.others} == {runs / "alpha", runs / "simulated"}
        await list_runs(cockpit, pilot)
        assert "2 marked" in screen_text(cockpit)
        await press(cockpit, pilot, "f", *"alpha", "enter", "space", "c")
        assert [one.folder for one in others.others] == [runs / "simulated"]


def test_the_chosen_runs_are_opened_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        theme = "cockpit-light"
        return_code = 7

        def __init__(self, following: NextRun | None) -> None:
            self.next_run, self.store = following, Store()

        def run(self) -> None:
            shown.append(self)

    shown: list[Screen] = []
    opened: list[tuple[NextRun, bool, str]] = []
    second, third = NextRun(Path("b"), True), NextRun(Path("c"), False)

    def app_of(following: NextRun, operator: bool, low_bandwidth: bool, theme: str) -> Screen:
        opened.append((following, operator, theme))
        return Screen(third if following is second else None)

    monkeypatch.setattr(opening, "_app_of", app_of)
    assert opening.show(Screen(second), operator=True) == 7  # type: ignore[arg-type]
    assert opened == [(second, True, "cockpit-light"), (third, True, "cockpit-light")] and len(shown) == 3


async def test_an_error_of_the_reader_is_shown(
    make_cockpit: MakeCockpit, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise TypeError(f"unexpected in {folder.name}")

    monkeypatch.setattr(run_list, "read_run", fail)
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await list_runs(cockpit, pilot)
        assert "an internal error stopped the reading: TypeError: unexpected in" in screen_text(cockpit)


async def test_c_without_marks_compares_with_the_run_at_the_cursor(
    make_cockpit: MakeCockpit, runs: Path
) -> None:
    cockpit = make_cockpit()
    async with cockpit.app.run_test(size=(80, 24)) as pilot:
        await list_runs(cockpit, pilot)
        await press(cockpit, pilot, "f", *"alpha", "enter", "c")
        others = cockpit.app.session.comparison
        await until(cockpit.app, pilot, lambda: not others.loading)
        await settle(cockpit, pilot)
        assert cockpit.app.screen.NAME == "curves" and [one.name for one in others.others] == ["alpha"]  # type: ignore[attr-defined]
