"""The DeepSpeed adapter in a real job of two ranks, with a small MoE model."""

from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

pytest.importorskip("deepspeed", reason="deepspeed is not installed: DS_BUILD_OPS=0 pip install deepspeed")

SCRIPT = "deepspeed_job.py"


@pytest.mark.exhaustive
@pytest.mark.timeout(500)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_accumulation_changed_live_equals_a_run_launched_with_it(stage: int, tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", stage=stage, accumulation=2, pause_s=0.05) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit("set", "gradient_accumulation_steps=4", "save=true", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first update with the new value
        seen = live.until(lambda seen: seen["step"] >= first + 6)
        scaled = live.cockpit("set", "lr_scale=0.5", "capacity_factor=2", "--wait")
        assert (scaled["state"], scaled["acks"]) == ("applied", 2), scaled
        live.until(lambda seen: seen["step"] >= scaled["applied_step"] + 2)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    assert (first - 1) * 2 % 4 == 0  # the number of completed micro-batches is a multiple of the new value
    widths = [changed[step][2] for step in range(1, max(changed) + 1)]
    assert widths == [2] * (first - 1) + [4] * (max(changed) - first + 1)

    step = seen["summary"]["step"]
    assert seen["ranks"][0]["step"]["step"] == step
    assert seen["ranks"][0]["step"]["loss"] == pytest.approx(changed[step][0])
    assert [seen["summary"][name] for name in ("lr", "grad_norm")] == pytest.approx(changed[step][1::2])
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [4 * 2 * 16] * 2
    assert {"forward", "backward", "optimizer"} <= seen["ranks"][1]["step"]["phases"].keys()
    width = 2 if seen["experts"]["step"] < first else 4
    assert [sum(layer["load"]) for layer in seen["experts"]["layers"]] == [width * 2 * 16 * 2]

    consumed = (first - 1) * 2 * 2 * 2  # sequences: updates x micro-batches x sequences each x ranks
    checkpoint = tmp_path / "live" / "checkpoints" / f"global_step{first - 1}"
    launched = {"accumulation": 4, "start": consumed, "resume": str(checkpoint), "cockpit": False}
    last = scaled["applied_step"] - 1
    with job(SCRIPT, tmp_path / "launched", stage=stage, first=first, updates=last, **launched) as other:
        expected = other.losses()
    compared = range(first, last + 1)
    assert len(compared) >= 6
    assert [changed[step] for step in compared] == [expected[step] for step in compared]
    # After the warm-up, which ends at update 5, the schedule falls linearly.
    rates = {step: noted[1] for step, noted in changed.items() if step > 5}
    fall = (rates[last] - rates[last - 1]) * (max(rates) - last)
    assert rates[max(rates)] == pytest.approx(0.5 * (rates[last] + fall))
    assert {len(noted) for noted in changed.values()} == {4}
