"""Fixtures of the fault tests: a hub that a test may kill, and objects that are closed after the test."""

from collections.abc import Iterator

import pytest

from tests.faults.guarded import Guarded
from tests.unit.agents.conftest import Opened, fleet, hub, opened, own_hub

__all__ = ["Opened", "fleet", "hub", "opened", "own_hub"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    guarded = Guarded(tmp_path_factory.mktemp("guarded"))
    yield guarded
    guarded.close()
