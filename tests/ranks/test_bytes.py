"""The meter counts what docs/bytes.md derives by hand, to the byte, on every rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.bytes import CASES


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.bytes", str(folder)]
    driver = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
    )
    assert driver.returncode == 0, driver.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_what_the_derivation_says(name: str, results: Path) -> None:
    ranks = sorted((results / name).glob("[0-9]*.json"), key=lambda path: int(path.stem))
    assert ranks
    for path in ranks:
        by_hand, metered = json.loads(path.read_text())
        assert metered == by_hand, f"rank {path.stem}"
