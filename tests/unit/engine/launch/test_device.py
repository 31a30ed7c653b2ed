"""The GPU path without a GPU: the choice of devices, and a step on meta tensors, which have a device but no data."""

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agents.rundir.runs import RunError
from engine import device
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.rank_main import check_same_device
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.expert_all_to_all import Placement
from engine.parallel.parameters import ParameterFactory
from engine.preflight.memory import device_refusal, too_few_gpus
from engine.rendezvous import single_rank_context
from engine.train.optimization.expert_bias import LossFreeBalancing
from tests.ranks.cases.cases import SMALL
from tests.unit.engine.config.test_layout import DEMO

CUDA = torch.device("cuda", 0)
META = torch.device("meta")  # meta replaces a GPU: like a GPU, it is not the host's device


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_world", "wanted", "chosen"),
    [
        (0, 0, 1, "auto", "cpu"),
        (1, 0, 1, "auto", "cuda:0"),
        (8, 3, 8, "auto", "cuda:3"),
        (8, 1, 2, "auto", "cuda:1"),
        (4, 3, 8, "auto", "cpu"),
        (8, 3, 8, "cpu", "cpu"),
        (8, 3, 8, "cuda", "cuda:3"),
    ],
)
def test_a_gpu_each_or_the_cpu_for_all(
    gpus: int, local_rank: int, local_world: int, wanted: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(monkeypatch, gpus)
    assert str(device.choose_device(local_rank, local_world, wanted)) == chosen


def see(monkeypatch: pytest.MonkeyPatch, gpus: int, nccl: bool = True) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)


def test_gpus_without_nccl_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 8, nccl=False)
    assert device.choose_device(0, 8) == device.CPU


def test_cuda_without_enough_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    see(monkeypatch, 1)
    with pytest.raises(
        RunError, match="a GPU for each of 2 ranks on this machine, but torch can use 1; legal: "
    ):
        device.choose_device(0, 2, "cuda")


def test_cuda_without_enough_gpus_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_refusal(2, "cuda") == too_few_gpus(0, 2)
    assert device_refusal(2, "auto") is None
    monkeypatch.setattr("sys.executable", "/absent")
    assert device_refusal(2, "cuda") is None, "the ranks refuse later"


def test_ranks_on_devices_of_two_kinds_refuse_to_start(tmp_path: Path) -> None:
    leader = single_rank_context(tmp_path)
    other = dataclasses.replace(leader, rank=1, world=2)
    check_same_device(CUDA, leader, leader.store())
    check_same_device(torch.device("cuda", 1), other, leader.store())
    with pytest.raises(ValueError, match="rank 1 computes on cpu, but rank 0 computes on cuda"):
        check_same_device(device.CPU, other, leader.store())


KINDS = {
    "dense": ["model.moe=none"],
    "tied": ["model.tie_embeddings=true"],
    "aux": ["model.moe.shared_experts=1", "knobs.z_loss_coef=0.1"],
    "bias": ["model.moe.balance=bias", "model.moe.groups=4", "model.moe.top_groups=2"],
    "drops": ["knobs.capacity_factor=1.0"],
    "probability": ["knobs.capacity_factor=1.0", "model.moe.drop=probability"],
    "expert choice": ["model.moe.router=expert_choice", "model.moe.balance=none"],
    "selective": ["knobs.recompute=selective"],
    "full": ["knobs.recompute=full"],
}


def layout_of(kind: str) -> Layout:
    return load(DEMO, [*SMALL, *KINDS[kind]])


def stage_of(layout: Layout, meter: Meter, where: torch.device = device.CPU) -> Stage:
    weights = ParameterFactory(1, Axis("tp", None, meter), Axis("ep", None, meter), device=where)
    return Stage(weights, layout.model, range(layout.model.layers), KnobValues.of(layout), meter)


@pytest.mark.parametrize("kind", KINDS)
def test_all_tensors_of_a_stage_are_created_on_its_device(kind: str) -> None:
    stage = stage_of(layout_of(kind), Meter(), META)
    assert {x.device for x in (*stage.parameters(), *stage.buffers())} == {META}
    keys = Placement([], [1, 0, 3, 2], META).keys_E
    assert keys is not None and keys.device == META


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_stays_on_its_device(kind: str) -> None:
    """All tensors of the stage are moved to the meta device. An operation that combines them with a tensor on another
    device, such as one that the code created on the CPU by mistake, raises an error. An operation that copies a value
    to the host, which would make the host wait for the device, also raises an error.
    """
    layout = layout_of(kind)
    model, tp = layout.model, Axis("tp", None, Meter())
    meter = Meter(model.layers, model.moe.experts if model.moe else 0)
    stage = stage_of(layout, meter)
    held = held_by(stage)
    with FakeTensorMode() as fake:
        to_meta(held, fake)
        meter.device = META
        meter.start_step(0)
        tokens = torch.zeros(2, model.seq_len, dtype=torch.int64, device=META)
        cross_entropy(stage(tokens), tokens, tp).backward()
        assert {p.grad.device for p in stage.parameters() if p.grad is not None} == {META}
        assert meter.readings.load.device == META


def held_by(stage: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor, bool]]:
    """All tensors of a stage, each as a tuple (module, name, values, whether it is a parameter)."""
    parameters = [
        (m, n, p.detach(), True) for m in stage.modules() for n, p in m.named_parameters(recurse=False)
    ]
    return parameters + [(m, n, b, False) for m in stage.modules() for n, b in m.named_buffers(recurse=False)]


def to_meta(held: list[tuple[nn.Module, str, torch.Tensor, bool]], fake: FakeTensorMode) -> None:
    """Move the tensors to the meta device, parameters as bf16: the grouped GEMM supports this dtype on all devices. A
    tied weight stays one tensor."""
    there: dict[int, torch.Tensor] = {}
    for module, name, values, is_parameter in held:
        moved = fake.from_tensor(values, static_shapes=True).to(
            META, torch.bfloat16 if is_parameter else None
        )
        there.setdefault(values.data_ptr(), nn.Parameter(moved) if is_parameter else moved)
        setattr(module, name, there[values.data_ptr()])


def test_biases_are_updated_from_counts_on_the_host() -> None:
    class World:
        tp = dp = replicas = Axis("dp", None, Meter())
        device = META

    stage = stage_of(layout_of("bias"), Meter(), World.device)
    LossFreeBalancing([stage], World())(torch.ones(2, 8, dtype=torch.int64))  # type: ignore[arg-type]
