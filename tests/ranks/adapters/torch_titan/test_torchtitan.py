"""The torchtitan adapter in a real job of two ranks, with torchtitan's debug Llama model on CPUs."""

from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install torchtitan triton")
pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")

SCRIPT = "torch_titan/job.py"


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_accumulation_changed_live_equals_a_run_launched_with_it(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", accumulation=2, pause_s=0.05) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit("set", "gradient_accumulation_steps=3", "save=true", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first step with the new value
        seen = live.until(lambda seen: seen["step"] >= first + 4)
        scaled = live.cockpit("set", "lr_scale=0.5", "--wait")
        assert (scaled["state"], scaled["acks"]) == ("applied", 2), scaled
        live.until(lambda seen: seen["step"] >= scaled["applied_step"] + 1)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    widths = [changed[step][2] for step in range(1, max(changed) + 1)]
    assert widths == [2] * (first - 1) + [3] * (max(changed) - first + 1)

    step = seen["summary"]["step"]
    assert seen["summary"]["loss"] == pytest.approx(changed[step][0])
    assert seen["summary"]["grad_norm"] == pytest.approx(changed[step][1])
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [3 * 2 * 16] * 2
    assert [rank["coords"] for rank in seen["ranks"]] == [{"dp_shard": 0}, {"dp_shard": 1}]
    assert {"data", "forward, backward", "optimizer"} <= seen["ranks"][1]["step"]["phases"].keys()

    last = scaled["applied_step"] - 1
    checkpoint = tmp_path / "live" / "checkpoint" / f"step-{first - 1}"
    launched = {"accumulation": 3, "resume": str(checkpoint), "steps": last, "cockpit": False}
    with job(SCRIPT, tmp_path / "launched", **launched) as other:
        expected = other.losses()
    compared = range(first, last + 1)
    assert len(compared) >= 4
    assert [changed[step][:2] for step in compared] == [expected[step][:2] for step in compared]
    # The learning rate is 8e-4 after the warm-up of two steps.
    assert (changed[last][3], changed[max(changed)][3]) == pytest.approx((8e-4, 4e-4))


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
def test_the_tokens_of_tensor_parallel_ranks_count_once(tmp_path: Path) -> None:
    options = {"ranks": 4, "tensor_parallel": 2, "accumulation": 2, "pause_s": 0.05}
    with job(SCRIPT, tmp_path / "live", **options) as live:
        seen = live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 4
        noted = live.losses()
    summary = seen["summary"]
    coords = [{"dp_shard": dp, "tp": tp} for dp in range(2) for tp in range(2)]
    assert [rank["coords"] for rank in seen["ranks"]] == coords
    # Two micro-batches of two sequences of 16 tokens for each of the two dp ranks.
    assert noted[summary["step"]][4] == 2 * 2 * 16 * 2
    assert summary["tokens_per_s"] * summary["step_ms"] / 1e3 == pytest.approx(noted[summary["step"]][4])
    assert summary["loss"] == pytest.approx(noted[summary["step"]][0])
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [2 * 2 * 16] * 4
