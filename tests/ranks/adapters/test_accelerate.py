"""The adapter for training loops with Accelerate in a real job of two ranks, with a tiny Mixtral."""

from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'train-cockpit[adapters]'"
)

SCRIPT = "accelerate_job.py"


@pytest.mark.timeout(400)
def test_accumulation_changed_live_equals_a_loop_launched_with_it(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", accumulation=2, pause_s=0.05) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit("set", "gradient_accumulation_steps=4", "save=true", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first update with the new value
        seen = live.until(lambda seen: seen["step"] >= first + 6)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    assert (first - 1) * 2 % 4 == 0  # the number of completed micro-batches is a multiple of the new value
    assert [changed[step][3] for step in range(1, max(changed) + 1)] == [2] * (first - 1) + [4] * (
        max(changed) - first + 1
    )

    step = seen["summary"]["step"]
    assert seen["ranks"][0]["step"]["step"] == step
    assert seen["ranks"][0]["step"]["loss"] == pytest.approx(changed[step][0])
    assert [seen["summary"][name] for name in ("grad_norm", "lr")] == pytest.approx(changed[step][1:3])
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [4 * 2 * 16] * 2
    assert {"data", "backward", "optimizer"} <= seen["ranks"][1]["step"]["phases"].keys()
    width = 2 if seen["experts"]["step"] < first else 4
    assert [sum(layer["load"]) for layer in seen["experts"]["layers"]] == [width * 2 * 16 * 2 * 2] * 2

    # sequences: updates x micro-batches x sequences per micro-batch x ranks
    consumed = (first - 1) * 2 * 2 * 2
    checkpoint = tmp_path / "live" / f"checkpoint-{first - 1}"
    launched = {"accumulation": 4, "start": consumed, "resume": str(checkpoint), "cockpit": False}
    with job(SCRIPT, tmp_path / "launched", first=first, updates=max(changed), **launched) as other:
        expected = other.losses()
    compared = range(first, max(changed) + 1)
    assert len(compared) >= 6
    assert [changed[step] for step in compared] == [expected[step] for step in compared]
