"""Compressed gradients in whole runs: equal replicas, clipping, lossless settings, checkpoints, other layouts."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.batches import ROOT
from tests.ranks.checkpoint.resume import tensors_in
from tests.ranks.compression.settings import RESUMED, SETTINGS, SMALLER

pytestmark = pytest.mark.xdist_group("compression")


def ran(folder: Path, scenario: str) -> Path:
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.compression", str(folder), scenario]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The results of each run, by rank."""
    folder = ran(tmp_path_factory.mktemp("methods"), "methods")
    by_rank = [json.loads((folder / f"methods-{rank}.json").read_text()) for rank in range(4)]
    return {name: [of_rank[name] for of_rank in by_rank] for name in by_rank[0]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("resumed"), "resumed")


@pytest.mark.parametrize("name", [*SETTINGS, "turned"])
def test_replicas_stay_bit_identical(name: str, runs: dict[str, list[Any]]) -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same shards."""
    digests = [of_rank["digests"] for of_rank in runs[name]]
    assert digests[0] == digests[2] and digests[1] == digests[3]
    assert digests[0] != digests[1] and len(set(digests[0])) == len(digests[0])


@pytest.mark.parametrize("name", [*SETTINGS, "turned"])
def test_norm_is_of_the_decompressed_gradient(name: str, runs: dict[str, list[Any]]) -> None:
    for of_rank in runs[name]:
        for norm, by_hand in zip(of_rank["norms"], of_rank["by hand"], strict=True):
            assert by_hand == pytest.approx([norm, norm], rel=1e-12)


@pytest.mark.parametrize("name", ["all of top_k", "all of random_k", "all of threshold"])
def test_lossless_settings_equal_no_compression(name: str, runs: dict[str, list[Any]]) -> None:
    assert runs[name][0]["norms"] == pytest.approx(runs["none"][0]["norms"], rel=1e-12)
    assert runs["top_k"][0]["norms"] != pytest.approx(runs["none"][0]["norms"], rel=1e-4)


def test_change_while_training_takes_effect_at_the_next_step(runs: dict[str, list[Any]]) -> None:
    """Step 0 is not compressed. The knobs that are changed in step 0 take effect in step 1 or 2."""
    assert runs["turned"][0]["norms"][0] == runs["none"][0]["norms"][0]
    assert runs["turned"][0]["norms"][2:] != runs["none"][0]["norms"][2:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RESUMED)
def test_resumed_run_equals_the_uninterrupted_one(name: str, saved: Path) -> None:
    """Residuals and factors are also bit-identical."""
    whole, again = (json.loads((saved / f"{name} {part}.json").read_text()) for part in ("whole", "again"))
    assert whole["norms"][4:] == again["norms"]
    first, second = (tensors_in(saved / f"{name} {part}/checkpoints/step-6") for part in ("whole", "again"))
    assert first.keys() == second.keys()
    residuals = [key for key in first if key.startswith("residual")]
    assert any(first[key].abs().max() > 0 for key in residuals)
    assert name != "power_sgd" or any(key.startswith("factor") for key in first)
    for key, tensor in first.items():
        assert tensor.equal(second[key]), key


@pytest.mark.exhaustive
def test_residuals_move_with_their_experts(saved: Path) -> None:
    changed, elsewhere, nonzero = json.loads((saved / "moved.json").read_text())
    assert changed == 0 < elsewhere and nonzero > elsewhere


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMALLER)
def test_another_layout_gets_the_sum_of_the_residuals(name: str, saved: Path) -> None:
    given: dict[str, float] = defaultdict(float)
    for key, tensor in tensors_in(saved / "top_k whole/checkpoints/step-4").items():
        if key.startswith("residual."):
            parameter = key.split(".", 2)[2]
            expert = ".experts." in parameter
            given[parameter.rpartition(".")[0] if expert else parameter] += float(tensor.double().sum())
    found = json.loads((saved / f"{name}.json").read_text())
    assert any(abs(total) > 1e-3 for total in given.values())
    for parameter, total in given.items():
        assert found[parameter] == pytest.approx(total, abs=1e-9), parameter
