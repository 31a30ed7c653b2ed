"""`cockpit demo` exits with the status of the run and prints why it failed."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from agents.protocol import Event, Gone
from cockpit.cli import demo
from cockpit.cli.main import run as command_line
from cockpit.tui.app import CockpitApp
from tests.screens.fake_run import FakeRun

WHY = "rank 1 failed: no [/space]\x1b[2J left"


class FakeEngine:
    """A fake engine process. `status` is the exit status if the process exits before `stop` is called; `stopped` is the
    exit status after `stop`."""

    status: int | None = None
    stopped = 0

    command: ClassVar[list[str]] = []  # the command line of the newest engine

    def __init__(self, layout: Path, arguments: list[str], folder: Path, command: str = "run") -> None:
        FakeEngine.command[:] = [command, layout.name, *arguments]
        self.exit_status, self.folder, self.log = type(self).status, folder, folder / "engine.log"

    def __enter__(self) -> "FakeEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.exit_status is None:
            self.exit_status = self.stopped

    def last_lines(self, count: int) -> list[str]:
        return [WHY][:count]


def run(monkeypatch: pytest.MonkeyPatch, engine: type[FakeEngine], failed: bool) -> int:
    def use(app: CockpitApp) -> None:
        app.store.apply(FakeRun().story(3))
        if failed:
            app.store.apply([Event(1.0, "error", "run", WHY)])
            app.store.apply(Gone(rank, clean=False, text=WHY, process="ended") for rank in range(8))

    monkeypatch.setattr(demo, "EngineProcess", engine)
    monkeypatch.setattr("cockpit.tui.open.need_terminal", lambda: None)
    monkeypatch.setattr(CockpitApp, "run", use)
    return demo.run_demo([])


def test_without_a_terminal_nothing_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class NotStarted(FakeEngine):
        def __enter__(self) -> FakeEngine:
            raise AssertionError("the engine was started")

    monkeypatch.setattr(demo, "EngineProcess", NotStarted)
    assert command_line(["demo"]) == 2  # pytest gives its tests no terminal
    said = capsys.readouterr()
    assert said.err.startswith("the screen needs a terminal, but standard ") and said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize("status", [None, 1, 7])
def test_a_failed_run_is_reported_and_fails(
    status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine: Any = type("Failed", (FakeEngine,), {"status": status, "stopped": 1})
    assert run(monkeypatch, engine, failed=True) == (status or 1)
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "the run failed: rank 1 failed: no [/space] [2J left"
    assert printed[-1].startswith("the complete output of the engine is in ") and printed[-1].endswith(
        "engine.log"
    )


def test_quitting_is_not_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, FakeEngine, failed=False) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0] == "stopping the run ..." and lines[1].startswith("demo was stopped; the last state")
    assert lines[2] == "  steps       3 of 300" and not printed.err


@pytest.mark.parametrize("named", ["layouts/moe-1b.toml", "kimi-k2"])
def test_it_simulates_a_file_or_a_shipped_layout(
    named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "EngineProcess", FakeEngine)
    monkeypatch.setattr("cockpit.tui.open.need_terminal", lambda: None)
    monkeypatch.setattr(CockpitApp, "run", lambda app: app.store.apply(FakeRun().story(1)))
    words = ["demo", "--simulate", named, "--speed", "5", "--seed", "3", "grid.pp=1"]
    assert command_line(words) == 0
    file = f"{Path(named).stem}.toml"
    options = ["--speed", "5", "--seed", "3"]
    assert FakeEngine.command == ["simulate", file, "train.steps=2000", "grid.pp=1", *options]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--simulate", "atlantis"], "there is no layout atlantis; legal: a TOML file, or "),
        (["--speed", "5"], "--speed needs --simulate NAME, such as --simulate deepseek-v3"),
        (
            ["--simulate", "layouts/demo.toml", "other.toml"],
            "give the layout to simulate after --simulate",
        ),
    ],
)
def test_a_simulation_is_refused_in_a_sentence(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line(["demo", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith(why) and said.count("\n") == 1
