"""Text that a run generates between its steps is the same in every layout, and does not affect training."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.program import run

OF_TRAINING = ("readings", "losses", "state", "random")


def trained(folder: Path, *names: str) -> dict[str, list[dict[str, Any]]]:
    """For each layout name, the results of both runs on each rank."""
    done = run("-W", "ignore", "-m", "tests.ranks.models.live_samples", str(folder), *names, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


def assert_training_unchanged(rows: list[dict[str, Any]], name: str) -> None:
    bound = 0.2 if name == "bf16" else 1e-10
    for rank, row in enumerate(rows):
        assert row["sampled"]["difference"] < bound, f"{name}, rank {rank}: the caches change the logits"
        for what in OF_TRAINING:
            assert row["plain"][what] == row["sampled"][what], f"{name}, rank {rank}: {what}"
    leader = rows[0]
    steps = len(leader["plain"]["losses"])
    assert leader["plain"]["steps"] == [] and leader["sampled"]["steps"] == [1, steps - 1] and steps > 2
    assert all(found == formula > 0 for found, formula in leader["sampled"]["cache"])


def test_training_is_the_same_with_and_without_generated_text(tmp_path: Path) -> None:
    assert_training_unchanged(trained(tmp_path, "zero 3")["zero 3"], "zero 3")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("reference", "others"),
    [
        ("one rank", ("zbv tp", "interleaved dp", "cp ring tp", "cp ulysses pp", "replicas, two hops")),
        ("one rank", ("compiled",)),
        ("mla, one rank", ("mla cp tp",)),
        ("tied window, one rank", ("tied window pp tp",)),
        ("bf16", ()),
    ],
)
def test_text_is_the_same_in_every_layout(tmp_path: Path, reference: str, others: tuple[str, ...]) -> None:
    found = trained(tmp_path, reference, *others)
    for name, rows in found.items():
        assert_training_unchanged(rows, name)
        assert rows[0]["sampled"]["tokens"] == found[reference][0]["sampled"]["tokens"], name
