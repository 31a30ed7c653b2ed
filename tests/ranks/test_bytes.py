"""The meter counts what docs/bytes.md derives by hand, to the byte, on every rank."""

import json
from pathlib import Path

import pytest

from tests.ranks.bytes import CASES
from tests.ranks.halves import in_halves


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    in_halves("tests.ranks.bytes", folder, list(CASES), timeout_s=250)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_what_the_derivation_says(name: str, results: Path) -> None:
    ranks = sorted((results / name).glob("[0-9]*.json"), key=lambda path: int(path.stem))
    assert ranks
    for path in ranks:
        by_hand, metered = json.loads(path.read_text())
        assert metered == by_hand, f"rank {path.stem}"
