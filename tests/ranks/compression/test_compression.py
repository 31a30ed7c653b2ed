"""Tests gradient compression in complete runs: equal replicas, clipping, lossless settings, checkpoints, and resuming
in other layouts."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.checkpoint.resume import tensors_in
from tests.ranks.compression.settings import QUICK, RESUMED, SETTINGS, SMALLER
from tests.ranks.program import run

pytestmark = pytest.mark.xdist_group("compression")

Results = Callable[[str], list[Any]]


def methods(*names: str) -> list[Any]:
    """One pytest parameter for each of the runs `names`; `make test` skips the runs that are not in QUICK."""
    quick = (*QUICK, "turned")
    return [
        name if name in quick else pytest.param(name, marks=pytest.mark.exhaustive, id=name) for name in names
    ]


def ran(folder: Path, scenario: str) -> Path:
    ended = run("-W", "ignore", "-m", "tests.ranks.compression", str(folder), scenario, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A function that returns the results of a training run, such as "top_k", by rank. If there are no results of this
    run yet, the function first starts a program that does this run and others."""
    done: dict[str, list[Any]] = {}

    def of_run(name: str) -> list[Any]:
        if name not in done:
            scenario = "quick" if name in (*QUICK, "turned") else "others"
            folder = ran(tmp_path_factory.mktemp(scenario), scenario)
            by_rank = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
            done.update({run: [of_rank[run] for of_rank in by_rank] for run in by_rank[0]})
        return done[name]

    return of_run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ran(tmp_path_factory.mktemp("resumed"), "resumed")


@pytest.mark.parametrize("name", methods(*SETTINGS, "turned"))
def test_replicas_stay_bit_identical(name: str, results: Results) -> None:
    """Ranks 0 and 1 are one replica, ranks 2 and 3 the other. Ranks 0 and 2, and 1 and 3, hold the same shards."""
    digests = [of_rank["digests"] for of_rank in results(name)]
    assert digests[0] == digests[2] and digests[1] == digests[3]
    assert digests[0] != digests[1] and len(set(digests[0])) == len(digests[0])


@pytest.mark.parametrize("name", methods(*SETTINGS, "turned"))
def test_norm_is_of_the_decompressed_gradient(name: str, results: Results) -> None:
    for of_rank in results(name):
        for norm, by_hand in zip(of_rank["norms"], of_rank["by hand"], strict=True):
            assert by_hand == pytest.approx([norm, norm], rel=1e-12)


@pytest.mark.parametrize("name", methods("all of top_k", "all of random_k", "all of threshold"))
def test_lossless_settings_equal_no_compression(name: str, results: Results) -> None:
    assert results(name)[0]["norms"] == pytest.approx(results("none")[0]["norms"], rel=1e-12)
    assert results("top_k")[0]["norms"] != pytest.approx(results("none")[0]["norms"], rel=1e-4)


def test_change_while_training_takes_effect_at_the_next_step(results: Results) -> None:
    """Step 0 is not compressed. The knobs that are changed in step 0 take effect in step 1 or 2."""
    assert results("turned")[0]["norms"][0] == results("none")[0]["norms"][0]
    assert results("turned")[0]["norms"][2:] != results("none")[0]["norms"][2:]


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
