"""bf16: activations and gathered weights are rounded; master weights, gradients, scores and loss stay in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agents.rank.agent import Agent
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.kernels.grouped import grouped
from engine.metering.meter import Meter
from engine.model.moe.moe_layer import MoeLayer
from engine.model.moe.router import Router
from engine.parallel.local_shards import local_shard
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO


@pytest.fixture
def trainers(tmp_path: Path) -> Iterator[list[Trainer]]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    layouts = [load(DEMO, [*SMALL, f"train.precision={precision}"]) for precision in ("fp32", "bf16")]
    yield [Trainer(layout, Meter(2, 8), Agent(None, lambda: (0, "", 0.0))) for layout in layouts]
    dist.destroy_process_group()


def test_only_activations_and_gathered_weights_are_rounded(trainers: list[Trainer]) -> None:
    dtypes: dict[str, torch.dtype] = {}
    full, half = trainers
    for module in half.stages[0].modules():
        if isinstance(module, MoeLayer):
            module.register_forward_hook(lambda _m, _i, out: dtypes.update(hidden=out.dtype))
        if isinstance(module, Router):
            module.register_forward_hook(
                lambda _m, _i, out: dtypes.update(logits=out[0].dtype, scores=out[1].dtype)
            )
    losses = [trainer.computation.forward_backward(0) for trainer in (full, half)]
    assert dtypes == {"hidden": torch.bfloat16, "logits": torch.float32, "scores": torch.float32}
    assert losses[1].dtype == torch.float32
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=2e-3)
    assert float(losses[1]) != float(losses[0])
    for parameter in half.stages[0].parameters():
        assert parameter.grad is not None
        assert local_shard(parameter).dtype == local_shard(parameter.grad).dtype == torch.float32


def test_the_grouped_gemm_in_bf16_is_the_product_rounded_once() -> None:
    rows, weights = torch.randn(23, 32).bfloat16(), torch.randn(4, 32, 48).bfloat16()
    offsets = torch.tensor([5, 5, 16, 23], dtype=torch.int32)
    exact = torch.cat(
        [
            part.double() @ weight.double()
            for part, weight in zip(rows.tensor_split([5, 5, 16]), weights, strict=True)
        ]
    )
    error = (grouped(rows, weights, offsets).double() - exact).abs()
    assert (error <= 2.0**-8 * exact.abs() + 1e-4).all()


def test_widths_must_be_aligned_for_the_grouped_gemm() -> None:
    load(DEMO, ["model.moe.d_expert=132"])
    with pytest.raises(LayoutError, match=r"d_expert = 132 is not aligned .* bf16; legal: a multiple of 8"):
        load(DEMO, ["model.moe.d_expert=132", "train.precision=bf16"])
