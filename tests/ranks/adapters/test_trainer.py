"""The adapter for the transformers `Trainer` in a real job of two ranks, with a tiny Mixtral."""

import time
from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'train-cockpit[adapters]'"
)
pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers' Trainer needs")

SCRIPT = "trainer_job.py"
SWITCH = ("set", "gradient_accumulation_steps=4", "save=true", "--wait")


@pytest.mark.timeout(400)
def test_accumulation_changed_live_equals_a_run_launched_with_it(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", accumulation=2, max_steps=400, count=6400, pause_s=0.02) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit(*SWITCH)
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first step with the new value
        seen = live.until(lambda seen: seen["step"] >= first + 6)
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    assert (first - 1) * 2 % 4 == 0  # the number of completed micro-batches is a multiple of the new value

    # The cockpit showed the same values as the trainer's own log.
    assert seen["summary"]["loss"] == pytest.approx(changed[seen["summary"]["step"]][0])
    assert seen["summary"]["grad_norm"] == pytest.approx(changed[seen["summary"]["step"]][1])
    assert seen["summary"]["lr"] == pytest.approx(changed[seen["summary"]["step"]][2])
    # Each rank has micro-batches of two sequences of 16 tokens.
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [4 * 2 * 16] * 2
    assert {"data", "forward", "backward", "optimizer"} <= seen["ranks"][1]["step"]["phases"].keys()
    # Two experts for each token of both ranks.
    width = 2 if seen["experts"]["step"] < first else 4
    assert [sum(layer["load"]) for layer in seen["experts"]["layers"]] == [width * 2 * 16 * 2 * 2] * 2
    assert seen["summary"]["load_max_over_mean"] >= 1

    checkpoint = tmp_path / "live" / "checkpoints" / f"checkpoint-{first - 1}"
    # sequences: updates x micro-batches x sequences per micro-batch x ranks
    consumed = (first - 1) * 2 * 2 * 2
    launched = {"accumulation": 4, "max_steps": 400, "count": 6400, "start": consumed, "cockpit": False}
    with job(SCRIPT, tmp_path / "launched", resume=str(checkpoint), steps=max(changed), **launched) as other:
        expected = other.losses()
    compared = range(first, max(changed) + 1)
    assert len(compared) >= 6
    assert [changed[step] for step in compared] == [expected[step] for step in compared]


@pytest.mark.timeout(400)
def test_lr_scale_scales_the_schedule_and_an_epoch_ends_as_the_data_do(tmp_path: Path) -> None:
    # An epoch has 22 micro-batches: 11 updates of two, or five updates of four and one of two.
    options = {"accumulation": 2, "epochs": 3, "count": 22 * 4, "pause_s": 0.05}
    with job(SCRIPT, tmp_path / "live", **options) as live:
        live.until(lambda seen: seen["step"] is not None)
        assert live.cockpit("set", "gradient_accumulation_steps=4", "--wait")["state"] == "applied"
        answer = live.cockpit("set", "lr_scale=0.5", "--wait")
        assert answer["state"] == "applied"
        losses = live.losses()
    first = answer["applied_step"]
    # The learning rate falls linearly from 0.01 to 0 over the 33 updates with which the job was launched.
    due = {step: 0.01 * (1 - (step - 1) / 33) * (0.5 if step >= first else 1) for step in losses}
    assert {step: noted[2] for step, noted in losses.items()} == pytest.approx(due)
    assert len(losses) < 33 and max(losses) == len(losses)  # fewer updates in the same three epochs
    assert "'epoch': '3'" in live.output


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
def test_an_evaluation_of_a_minute_raises_no_alert(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", accumulation=1, max_steps=6, evaluation_s=60.0) as live:
        live.until(lambda seen: seen["step"] == 4)
        doing, alerts = set(), set()
        while True:
            seen = live.cockpit("snapshot")
            if seen["step"] > 4:
                break
            alerts |= {alert["name"] for alert in seen["alerts"]}
            doing |= {rank["pulse"]["doing"] for rank in seen["ranks"] if rank["pulse"]}
            time.sleep(0.5)
        assert len(live.losses()) == 6
    assert alerts == set() and "evaluation" in doing
