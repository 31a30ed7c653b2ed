"""Outputs of `engine` that need a trained checkpoint satisfy the published schemas."""

import json
from pathlib import Path

import pytest

from tests.ranks.driver import TIMEOUT_S
from tests.ranks.program import run
from tests.unit.cockpit.schemas import check
from tests.unit.engine.config.test_layout import DEMO

SMALL = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "model.layers=2", "model.d_model=32"]
SMALL += ["model.seq_len=32", "train.steps=2", "checkpoint.every=1", "sample.every=2", "--hub", "none"]


@pytest.mark.exhaustive
def test_outputs_about_a_checkpoint(tmp_path: Path) -> None:
    trained = tmp_path / "trained"
    for name, *words in (
        ("engine-run", "run", str(DEMO), *SMALL, "--run-dir", str(trained)),
        ("engine-sample", "sample", str(trained), "--prompt", "ab", "--tokens", "4"),
        ("engine-export-hf", "export-hf", str(trained), str(tmp_path / "hf")),
    ):
        done = run("-m", "engine", *words, "--json", timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in done.stdout.splitlines()]
        assert name != "engine-run" or {"checkpoint", "sample"} <= {record["event"] for record in records}
        check(name, *records)
