"""Runs on one and two GPUs, compared with the same runs on the CPU."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.grouped import fault, grouped
from engine.metering.clocks import CLOCKS
from engine.parallel.context.context_parallel import ATTENTION_METHODS
from engine.planner.hardware.peaks import peak_flops
from engine.planner.hardware.table import load
from tests.ranks.cases.cases import SMALL
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.parallel.test_context_parallel import near_the_truth

# Tolerance of an fp32 loss after a few steps, relative, because a GPU adds numbers in another order.
ROUNDING = 1e-4
MIXES = {
    "dense": ["model.moe=none"],
    "drops": ["knobs.capacity_factor=1.0", "knobs.recompute=full"],
    "bias": ["model.moe.balance=bias", "model.moe.shared_experts=1"],
    "expert choice": ["model.moe.router=expert_choice", "model.moe.balance=none"],
    "documents": ["data.separate_documents=true", "data.reset_positions=true", "model.head_dim=16"],
    "zero 3": ["train.zero=3", "knobs.micro_batches=4"],
}
TWO = {
    "dp": ["grid.dp_shard=2"],
    "replicas": ["grid.dp_replicate=2"],
    "tp": ["grid.tp=2"],
    "cp": ["grid.cp=2"],
    "documents over cp": ["grid.cp=2", "data.separate_documents=true", "model.head_dim=16"],
    "pp": ["grid.pp=2"],
    "ep": ["grid.dp_shard=2", "grid.ep=2"],
}


def python(*words: str) -> str:
    """The standard output of ``python WORDS ...``, which must succeed."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run(folder: Path, where: str, *overrides: str, resume: Path | None = None) -> list[dict[str, Any]]:
    """Run a short training and return its step events. `where`: the device, "cpu" or "cuda", which is also the name of
    the run's folder in `folder`; `resume`: a checkpoint from which the run continues."""
    command = ["-m", "engine", "run", str(DEMO), *SMALL, "train.steps=6", *overrides]
    options = ["--json", "--hub", "none", "--device", where, "--run-dir", str(folder / where)]
    options += ["--resume", str(resume)] if resume else []
    events = [json.loads(line) for line in python(*command, *options).splitlines()]
    return [event for event in events if event["event"] == "step"]


def same(folder: Path, *overrides: str) -> None:
    here, there = run(folder, "cpu", *overrides), run(folder, "cuda", *overrides)
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in there] == pytest.approx([step[key] for step in here], rel=ROUNDING)


@pytest.mark.parametrize("mix", MIXES)
def test_one_gpu_trains_as_the_cpu_does(mix: str, tmp_path: Path) -> None:
    same(tmp_path, *MIXES[mix], "train.optimizer=sgd", "train.lr=0.1")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("axis", TWO)
def test_two_gpus_train_as_two_cpu_ranks_do(axis: str, tmp_path: Path) -> None:
    same(tmp_path, *TWO[axis], "train.optimizer=sgd", "train.lr=0.1")


def test_a_run_in_bf16(tmp_path: Path) -> None:
    steps = run(tmp_path, "cuda", "train.precision=bf16")
    assert steps[-1]["loss"] < steps[0]["loss"]
    known = peak_flops(torch.cuda.get_device_name(), "bf16")
    assert all((step["mfu"] is None) == (known is None) for step in steps)


def test_a_deterministic_run_repeats_every_bit(tmp_path: Path) -> None:
    overrides = ("train.precision=bf16", "train.deterministic=true", "knobs.capacity_factor=1.0")
    first, second = (run(tmp_path / n, "cuda", *overrides) for n in "ab")
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in first] == [step[key] for step in second]


@pytest.mark.parametrize(("where", "there"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_a_run_continues_on_another_device(where: str, there: str, tmp_path: Path) -> None:
    """A run resumes on the device `there` from a checkpoint that was saved on the device `where`. AdamW has state, so a
    lost moment would change the loss."""
    whole = run(tmp_path / "whole", where, "checkpoint.every=3")
    checkpoint = tmp_path / "whole" / where / "checkpoints" / "step-3"
    rest = run(tmp_path / "rest", there, "checkpoint.every=3", resume=checkpoint)
    assert [step["step"] for step in rest] == [3, 4, 5]
    for key in ("loss", "grad_norm"):
        assert [step[key] for step in rest] == pytest.approx([step[key] for step in whole[3:]], rel=ROUNDING)


def test_sampling_on_a_gpu_gives_the_text_of_the_cpu(tmp_path: Path) -> None:
    run(tmp_path, "cuda", "checkpoint.every=6")
    command = ["-m", "engine", "sample", str(tmp_path / "cuda"), "--prompt-ids", "1,2,3", "--json"]
    command += ["--temperature", "0", "--tokens", "12", "--device"]
    here, there = (json.loads(python(*command, where))["tokens"] for where in ("cpu", "cuda"))
    assert here == there


def test_the_probe_describes_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.toml"
    overrides = ("train.precision=bf16", "model.layers=2")
    layout = str(DEMO.with_name("dense-1b.toml"))
    python("-m", "engine", "probe", layout, *overrides, "--quick", "--device", "cuda", "--out", str(out))
    found = load(out)
    known = peak_flops(torch.cuda.get_device_name(), "bf16")
    assert torch.cuda.get_device_name() in found.device.source
    assert 0.05 < found.efficiency.gemm <= 1.0 and (known is None or found.device.peak["bf16"] >= known)
    assert found.device.memory_bytes == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_context_parallel_attention_in_bf16(method: str) -> None:
    """This is the only test that runs the CUDA kernel in ring attention. The kernel needs a contiguous log-sum-exp."""
    near_the_truth(method, "cuda")


def test_cuda_events_agree_with_wall_time() -> None:
    clock, measured = CLOCKS["cuda"](), list[float]()
    torch.cuda.synchronize()
    began = time.perf_counter()
    first = clock.mark()
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        x = (x @ x).clamp(-1, 1)
    clock.between(first, clock.mark(), measured.append)
    clock.collect()
    assert not measured  # the GPU is still running, because 50 products take longer than launching them
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    clock.collect()
    assert measured[0] == pytest.approx(wall, rel=0.2)


@pytest.mark.parametrize(("x", "y"), [(64, 128), (768, 2048), (2048, 768)])
def test_torchs_grouped_gemm_is_right(x: int, y: int) -> None:
    assert fault(grouped, x, y, torch.bfloat16, torch.device("cuda")) == ""
