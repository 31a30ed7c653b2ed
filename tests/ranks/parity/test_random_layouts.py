"""Compares training in random layouts with training in one process; docs/evidence/parity.md lists the results for more
seeds."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.program import ROOT

SEEDS = (0, 4)


@pytest.mark.exhaustive
def test_random_layouts_equal_one_process(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.parity.random_layouts"]
    ended = subprocess.run(
        [*command, str(tmp_path), *map(str, SEEDS)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-4000:]
    assert f"{SEEDS[1] - SEEDS[0]} layouts, 0 failed" in ended.stdout
