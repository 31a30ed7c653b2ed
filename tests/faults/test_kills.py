"""Fault 3 and 9, at length: proposals in a storm of hub kills. `python -m tests.faults.storm` is the whole of it."""

import os
from pathlib import Path

from tests.faults.storm import Storm

PROPOSALS = int(os.environ.get("COCKPIT_STORM", "100"))


def test_no_command_is_lost_or_doubled(tmp_path: Path) -> None:
    storm = Storm(tmp_path / "run", PROPOSALS, kills=max(1, PROPOSALS // 12), seed=1)
    try:
        outcome = storm.run()
    finally:
        storm.close()
    assert outcome.wrong == []
    assert len(outcome.states) == PROPOSALS and "applied" in outcome.counts()
