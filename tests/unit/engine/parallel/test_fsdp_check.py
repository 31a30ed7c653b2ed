"""`probe` refuses a version of torch whose FSDP2 reduces gradients differently from what the engine expects. The tests
run one rank in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from engine.config.grid import Grid
from engine.device import CPU
from engine.metering.meter import Meter
from engine.parallel.mesh import World
from engine.rendezvous import single_rank_context
from engine.sharding import fsdp_check as subject
from engine.sharding.fsdp import POLICIES


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield World(Grid(), Meter())
    dist.destroy_process_group()


def probe(world: World, precision: str) -> None:
    subject.probe(world.dense["fsdp"], world.dp, world.replicas, POLICIES[precision], CPU)


@pytest.mark.parametrize("precision", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_installed_torch_passes(precision: str, dtype: torch.dtype, world: World) -> None:
    torch.set_default_dtype(dtype)
    try:
        probe(world, precision)
    finally:
        torch.set_default_dtype(torch.float32)


def test_sums_in_bf16_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.FsdpUnit, "accumulate", lambda _: None)  # no effect
    with pytest.raises(RuntimeError, match=r"a gradient is 257 instead of 258"):
        probe(world, "bf16")


def test_divided_gradients_are_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        FSDPModule,
        "set_force_sum_reduction_for_comms",
        lambda module, _: module.set_gradient_divide_factor(2.0),
    )
    with pytest.raises(RuntimeError, match=r"a gradient is 129 instead of 258"):
        probe(world, "fp32")


@pytest.mark.parametrize("gone", ["set_all_reduce_hook", "_get_fsdp_state"])
def test_a_removed_torch_function_is_refused(
    gone: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, gone)
    with pytest.raises(
        RuntimeError, match=rf"^torch .* does not reduce .*\(AttributeError: .*{gone}.*\); install torch"
    ):
        probe(world, "fp32")
