"""`tests.bench.training.gpu` without a GPU: model sizes, table rows, and one configuration on the CPU."""

import json
import subprocess
import sys

import pytest
import torch

from engine.config.sizes import parameter_count
from engine.config.toml import load
from tests.bench.runs import ROOT
from tests.bench.training.gpu import LAYOUTS, OURS, hugging_face, row

TINY = ["model.layers=1", "model.d_model=64", "model.heads=4", "model.kv_heads=2", "model.vocab=512"]
TINY += ["model.seq_len=64", "model.moe.d_expert=64"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_hugging_face_model_has_equal_sizes(name: str) -> None:
    pytest.importorskip("transformers")
    layout = load(ROOT / f"layouts/{name}.toml")
    with torch.device("meta"):
        assert sum(p.numel() for p in hugging_face(layout).parameters()) == parameter_count(layout.model)


def test_rows_of_the_table() -> None:
    layout = load(ROOT / "layouts/dense-1b.toml")
    measured = {"device": "NVIDIA H200", "ms": 500.0, "bytes": 3 * 2**30}
    flops = 6 * 32768 * (parameter_count(layout.model) - 32768 * 2048 - 33 * 2048 + 16 * 2048 * 2048)
    assert (
        row(layout, OURS, measured)
        == f"| dense-1b | ours | 500.0 | 65,536 | {flops / 0.5 / 989.4e12:.1%} | 3.0 |"
    )
    assert row(layout, OURS, measured | {"device": "cpu"}) == "| dense-1b | ours | 500.0 | 65,536 | · | 3.0 |"
    assert row(layout, OURS, {"why": "out of memory"}) == "| dense-1b | ours | out of memory | | | |"


@pytest.mark.exhaustive
def test_one_configuration_on_the_cpu() -> None:
    command = [sys.executable, "-m", "tests.bench.training.gpu", OURS, "layouts/moe-1b.toml", *TINY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    if not torch.cuda.is_available():
        assert measured["device"] == "cpu"
    assert measured["ms"] > 0 and measured["bytes"] > 0
