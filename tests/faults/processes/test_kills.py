"""Faults 3 and 9 of docs/evidence/faults.md: the hub is killed repeatedly, while clients send many proposals.
`python -m tests.faults.storm` runs a longer version.
"""

import os
from pathlib import Path

import pytest

from tests.faults.storm import Storm

PROPOSALS = int(os.environ.get("COCKPIT_STORM", "100"))


@pytest.mark.parametrize("proposals", [16, pytest.param(PROPOSALS, marks=pytest.mark.exhaustive, id="storm")])
def test_no_command_is_lost_or_applied_twice(tmp_path: Path, proposals: int) -> None:
    storm = Storm(tmp_path / "run", proposals, kills=max(2, proposals // 12), seed=1)
    try:
        outcome = storm.run()
    finally:
        storm.close()
    assert outcome.wrong == []
    assert len(outcome.states) == proposals and "applied" in outcome.counts()
