"""A checkpoint of four ranks produces the same logits and the same text in every layout that can generate."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.launch.test_run import ROOT
from tests.ranks.models.sampling import GRIDS, TRAINED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sampling")
    command = [sys.executable, "-W", "ignore", "-m", "tests.ranks.models.sampling", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


@pytest.mark.parametrize("kind", TRAINED)
def test_logits_and_text_are_equal_in_every_layout(folder: Path, kind: str) -> None:
    rows: dict[str, Any] = {name: json.loads((folder / kind / f"{name}.json").read_text()) for name in GRIDS}
    one = rows.pop("one rank")
    wanted = torch.tensor(one["logits"], dtype=torch.float64)
    assert wanted.std() > 0.01 and len({tuple(text) for text in one["random"]}) == 2
    for name, row in rows.items():
        found = torch.tensor(row["logits"], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=f"{kind}, {name}")
        assert (row["greedy"], row["random"]) == (one["greedy"], one["random"]), name
    latent = kind.startswith("latents")  # the latent is whole on each tp rank; key heads are split
    assert rows["tp ep"]["cache"] == (one["cache"] if latent else one["cache"] // 2)
