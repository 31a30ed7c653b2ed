"""The Megatron-LM adapter in a real job of two ranks, which runs Megatron-LM's pretrain_gpt.py on CPUs."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks.adapters.jobs import job

if not (find_spec("megatron") and find_spec("megatron.training") and find_spec("pretrain_gpt")):
    pytest.skip("Megatron-LM is not installed: add a checkout of it to PYTHONPATH", allow_module_level=True)
for needed in ("triton", "pybind11"):
    pytest.importorskip(needed, reason=f"{needed} is not installed, which Megatron-LM imports")

SCRIPT = "megatron_lm/job.py"
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(500)]


def test_micro_batches_changed_live_equal_a_run_launched_with_them(tmp_path: Path) -> None:
    with job(SCRIPT, tmp_path / "live", micro_batches=2, pause_s=0.1) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 3)
        answer = live.cockpit("set", "num_microbatches=4", "save=true", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        first = answer["applied_step"]  # the first step with the new value
        live.until(lambda seen: seen["step"] >= first + 2)
        full = live.cockpit("set", "recompute_granularity=full", "--wait")
        assert (full["state"], full["acks"]) == ("applied", 2), full
        refused = live.cockpit("set", "num_microbatches=2", "--wait")
        assert refused["state"] == "rejected" and "4 to 1024" in refused["why"], refused
        seen = live.until(lambda seen: seen["step"] >= full["applied_step"] + 3)
        changes = [
            "lr_scale=0.5",
            "moe_aux_loss_coeff=5",
            "moe_z_loss_coeff=1",
            "moe_expert_capacity_factor=0.25",
        ]
        scaled = live.cockpit("set", *changes, "--wait")
        assert (scaled["state"], scaled["acks"]) == ("applied", 2), scaled
        later = live.until(lambda seen: seen["experts"]["step"] >= scaled["applied_step"])
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        changed = live.losses()
    widths = [changed[step][2] for step in range(1, max(changed) + 1)]
    assert widths == [2] * (first - 1) + [4] * (max(changed) - first + 1)
    assert max(changed) < 200

    step = seen["summary"]["step"]
    assert seen["summary"]["loss"] == pytest.approx(changed[step][0])
    assert seen["summary"]["grad_norm"] == pytest.approx(changed[step][1])
    assert seen["summary"]["lr"] == pytest.approx(0.01)
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [4 * 2 * 16] * 2
    assert [rank["coords"] for rank in seen["ranks"]] == [{"dp": 0, "ep": 0}, {"dp": 1, "ep": 1}]
    assert {"data, forward, backward", "optimizer"} <= seen["ranks"][1]["step"]["phases"].keys()
    # 32 tokens in each micro-batch of a rank, 2 experts each; an expert then keeps 24 of them, at the end 4.
    pairs = (2 if seen["experts"]["step"] < first else 4) * 2 * 32 * 2
    assert [sum(layer["load"]) for layer in seen["experts"]["layers"]] == [pairs] * 2, seen["experts"]
    assert all(layer["dropped"] < 0.2 * pairs for layer in seen["experts"]["layers"]), seen["experts"]
    for layer in later["experts"]["layers"]:
        kept = sum(layer["load"]) - layer["dropped"]
        assert sum(layer["load"]) == 512 and 100 <= kept <= 4 * 4 * 4 * 2, layer

    last = scaled["applied_step"] - 1
    checkpoints = str(tmp_path / "live" / "checkpoints")
    launched = {"micro_batches": 4, "load": checkpoints, "step": first - 1, "stop": last, "cockpit": False}
    with job(SCRIPT, tmp_path / "launched", **launched) as other:
        expected = other.losses()
    compared = range(first, last + 1)
    assert len(compared) >= 6
    assert [changed[step][:2] for step in compared] == [expected[step][:2] for step in compared]
    assert changed[max(changed)][3] == pytest.approx(0.005)


def test_pipeline_stages_report_their_part(tmp_path: Path) -> None:
    options = (
        "--pipeline-model-parallel-size 2 --moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity"
    )
    with job(SCRIPT, tmp_path / "live", micro_batches=3, replicas=1, options=options, pause_s=0.1) as live:
        live.until(lambda seen: seen["step"] is not None and seen["step"] >= 2)
        answer = live.cockpit("set", "num_microbatches=6", "--wait")
        assert (answer["state"], answer["acks"]) == ("applied", 2), answer
        seen = live.until(lambda seen: seen["experts"]["step"] >= answer["applied_step"])
        names = {knob["name"] for knob in seen["knobs"]}
        assert "moe_expert_capacity_factor" not in names and "moe_z_loss_coeff" in names, names
        assert live.cockpit("set", "stop=true", "--wait")["acks"] == 2
        losses = live.losses()
    assert seen["summary"]["loss"] == pytest.approx(losses[seen["summary"]["step"]][0])
    assert [rank["coords"] for rank in seen["ranks"]] == [{"pp": 0}, {"pp": 1}]
    assert [rank["step"]["tokens"] for rank in seen["ranks"]] == [None, 6 * 2 * 16]
    loads = [(layer["layer"], sum(layer["load"])) for layer in seen["experts"]["layers"]]
    assert loads == [(0, 6 * 2 * 16 * 2), (1, 6 * 2 * 16 * 2)]
