"""A checkpoint that four ranks have written produces the same logits and the same text in every layout that can
generate text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.models.sampling import GRIDS, TRAINED
from tests.ranks.program import run


@pytest.mark.parametrize("kind", TRAINED)
def test_logits_and_text_are_equal_in_every_layout(tmp_path: Path, kind: str) -> None:
    done = run("-W", "ignore", "-m", "tests.ranks.models.sampling", str(tmp_path), kind, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    rows: dict[str, Any] = {
        name: json.loads((tmp_path / kind / f"{name}.json").read_text()) for name in GRIDS
    }
    one = rows.pop("one rank")
    wanted = torch.tensor(one["logits"], dtype=torch.float64)
    assert wanted.std() > 0.01 and len({tuple(text) for text in one["random"]}) == 2
    for name, row in rows.items():
        found = torch.tensor(row["logits"], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10, msg=f"{kind}, {name}")
        assert (row["greedy"], row["random"]) == (one["greedy"], one["random"]), name
    latent = kind.startswith("latents")  # the latent is whole on each tp rank; key heads are split
    assert rows["tp ep"]["cache"] == (one["cache"] if latent else one["cache"] // 2)
