"""Fixtures with hubs and ranks for one test or one module."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from agents.hub.recorder import Limits
from agents.hub.telemetry.update_log import UpdateLog
from tests.unit.agents.control_harness import ControlHarness
from tests.unit.agents.fleet import Fleet, HubProcess
from tests.unit.agents.recorder_run import MakeRun, Run


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Opened:
    """Opens clients, peers and fleets, and closes them after the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, one: C) -> C:
        return self._stack.enter_context(closing(one))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One hub that all tests of a module share."""
    process = HubProcess(tmp_path_factory.mktemp("run")).start()
    yield process
    process.clean_up()


@pytest.fixture(scope="module")
def fleet(hub: HubProcess) -> Iterator[Fleet]:
    """Four simulated ranks that are connected to the hub of the test module."""
    ranks = Fleet(hub.endpoints.ranks)
    yield ranks
    ranks.close()


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub for one test only, so that the test may kill it."""
    process = HubProcess(tmp_path / "run").start()
    yield process
    process.clean_up()


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as stack:
        yield Opened(stack)


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ControlHarness]:
    controller = ControlHarness(tmp_path / "run.db")
    controller.train()
    yield controller
    controller.journal.close()


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[MakeRun]:
    runs: list[Run] = []

    def make(update_log: UpdateLog | None = None, **limits: object) -> Run:
        run = Run(
            tmp_path / "run.db", Limits(**{"commit_s": 0.01, "snapshot_multiple": 0, **limits}), update_log
        )  # type: ignore[arg-type]
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.recorder.close()
