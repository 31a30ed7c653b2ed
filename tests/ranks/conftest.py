"""Fixtures of the tests with several processes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks.driver import Driver


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    driver.clean()
