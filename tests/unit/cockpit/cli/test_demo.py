"""`cockpit demo` exits with the status of the run and prints why it failed."""

from pathlib import Path
from typing import Any

import pytest

from agents.protocol import Event, Gone
from cockpit.cli import demo
from cockpit.tui.app import CockpitApp
from tests.screens.fake_run import FakeRun

WHY = "rank 1 failed: no [/space]\x1b[2J left"


class FakeEngine:
    """A fake of the engine process. `status` is the exit status if it ends by itself, `stopped` the one after
    `stop`."""

    status: int | None = None
    stopped = 0

    def __init__(self, layout: Path, overrides: list[str], folder: Path) -> None:
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
    monkeypatch.setattr(CockpitApp, "run", use)
    return demo.run_demo([])


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
    assert printed.out.startswith("stopping the run ...") and not printed.err
