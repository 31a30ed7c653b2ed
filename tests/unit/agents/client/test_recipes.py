"""Runs the recipes of docs/join/clients.md, exactly as printed there, on a live simulated run."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agents.fleet import SOURCE
from tests.unit.cockpit.simulated_run import NAME, simulated_run

PAGE = SOURCE / "docs" / "join" / "clients.md"
WATCH, SWEEP, EXPORT = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
STRAGGLER = "[[events]]\nkind = 'straggler'\nstep = 3\nrank = 5\nfactor = 2.0\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "slow.toml").write_text(STRAGGLER)
    with simulated_run(folder, "4", "--scenario", str(folder / "slow.toml")):
        yield folder


def printed(runs: Path, recipe: str, *arguments: str) -> str:
    """Run the recipe and return its output. The recipe must not fail or print warnings."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", recipe, NAME, *arguments],
        env=os.environ | {"PYTHONPATH": str(SOURCE), "COCKPIT_RUNS": str(runs)},
        cwd=runs,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.exhaustive
def test_an_alert_is_reported_once(runs: Path) -> None:
    lines = printed(runs, WATCH, "8").splitlines()
    slow = [line for line in lines if "straggler of rank 5" in line]
    assert len(slow) == 1 and re.match(r"step \d+: straggler of rank 5: \S", slow[0])


def test_a_sweep_keeps_only_a_faster_value(runs: Path) -> None:
    first, second, third = printed(runs, SWEEP, "micro_batches", "2", "16", "3").splitlines()
    assert re.fullmatch(r"micro_batches=2: kept, step time x0\.\d+ \(0\.\d+ to 0\.\d+\)", first)
    assert re.fullmatch(
        r"micro_batches=16: reverted, step time x[1-9]\.\d+ \([1-9]\.\d+ to [1-9]\.\d+\)", second
    )
    assert third.startswith("micro_batches=3: failed, ") and "not legal" in third


def test_exported_steps_equal_the_recording(runs: Path) -> None:
    rows = list(csv.reader(printed(runs, EXPORT, "2", "5", "loss", "validation_loss").splitlines()))
    assert rows[0] == ["step", "loss", "validation_loss"] and [row[0] for row in rows[1:]] == list("2345")
    assert all(float(row[1]) > 0 and row[2] == "" for row in rows[1:])
