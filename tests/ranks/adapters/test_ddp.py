"""`join_ranks` in a real job of two ranks: a user's own training loop with DistributedDataParallel."""

from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

pytest.importorskip("torch")

SCRIPT = "ddp_job.py"


@pytest.mark.timeout(400)
def test_accumulation_changed_live_equals_a_loop_launched_with_it(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", accumulation=2, pause_s=0.02) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit("set", "accumulation=4", "save=true", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first update with the new value
        seen = live.until(lambda seen: seen["step"] >= first + 6)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    widths = [changed[step][1] for step in range(1, max(changed) + 1)]
    assert widths == [2] * (first - 1) + [4] * (max(changed) - first + 1)
    own = seen["ranks"][0]["step"]
    assert own["loss"] == pytest.approx(changed[own["step"]][0])
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [16, 16]

    checkpoint = tmp_path / "live" / f"checkpoint-{first - 1}.pt"
    launched = {"accumulation": 4, "resume": str(checkpoint), "first": first, "updates": max(changed)}
    with job(SCRIPT, tmp_path / "launched", **launched, hub="none") as other:
        expected = other.losses()
    compared = range(first, max(changed) + 1)
    assert len(compared) >= 6
    assert [changed[step] for step in compared] == [expected[step] for step in compared]
