"""Hubs and ranks that are there for a test, or for a module of tests."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from tests.unit.agents.fleet import Fleet, HubProcess


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


class Opened:
    """Clients, peers and fleets that are closed after the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def __call__(self, one: C) -> C:
        return self._stack.enter_context(closing(one))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One hub for a module."""
    process = HubProcess(tmp_path_factory.mktemp("run")).start()
    yield process
    process.clean_up()


@pytest.fixture(scope="module")
def fleet(hub: HubProcess) -> Iterator[Fleet]:
    """Four ranks on the module's hub."""
    ranks = Fleet(hub.endpoints.ranks)
    yield ranks
    ranks.close()


@pytest.fixture
def own_hub(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub that a test may kill."""
    process = HubProcess(tmp_path / "run").start()
    yield process
    process.clean_up()


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as stack:
        yield Opened(stack)
