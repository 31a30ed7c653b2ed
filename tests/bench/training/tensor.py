"""Compares the engine's blocks at tp=2 with torch's `parallelize_module` on the same blocks, with sequence
parallelism in both."""

import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.sections.model import Model
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.model.attention import rope_table, rotate
from engine.model.interface import Parts
from engine.model.transformer import TransformerBlock
from engine.parallel.collectives import Axis
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory
from engine.rendezvous import RankContext
from engine.sharding.fsdp import sum_over_tp

TP = 2
LAYERS, BATCH, MICRO_BATCHES = 4, 4, 4
SIZES = {"d=64, S=64": (64, 4, 64), "d=256, S=256": (256, 8, 256)}
ROUNDS = 30


class TorchAttention(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.head_dim = model.head_width
        D, C = model.d_model, model.head_width
        self.q = nn.Linear(D, model.heads * C, bias=False)
        self.k = nn.Linear(D, model.kv * C, bias=False)
        self.v = nn.Linear(D, model.kv * C, bias=False)
        self.o = nn.Linear(model.heads * C, D, bias=False)
        self.register_buffer("rope", rope_table(model.seq_len, C, model.rope_theta), persistent=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        q, k, v = (linear(x_BSD).view(B, S, -1, self.head_dim) for linear in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, self.rope), rotate(k, self.rope), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class TorchMlp(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.gate = nn.Linear(model.d_model, model.ff, bias=False)
        self.up = nn.Linear(model.d_model, model.ff, bias=False)
        self.down = nn.Linear(model.ff, model.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TorchBlock(nn.Module):
    """The same block as the engine's, written for `parallelize_module`."""

    def __init__(self, model: Model):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.attention = TorchAttention(model)
        self.mlp_norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.mlp = TorchMlp(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def with_torch(model: Model, mesh: DeviceMesh) -> nn.Sequential:
    """Apply torchtitan's tensor-parallel plan: the residual stream is sharded along the sequence, and weights are
    sharded column-wise, then row-wise."""
    blocks = nn.Sequential(*(TorchBlock(model) for _ in range(model.layers)))
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = ColwiseParallel()
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    norm = SequenceParallel()
    plan = {"attention_norm": norm, "attention": whole, "mlp_norm": norm, "mlp": whole}
    plan |= {f"attention.{name}": columns for name in "qkv"} | {"attention.o": rows}
    plan |= {"mlp.gate": columns, "mlp.up": columns, "mlp.down": rows}
    for block in blocks:
        parallelize_module(block, mesh, plan)
    return blocks


def with_ours(model: Model, tp: Axis, mesh: DeviceMesh) -> nn.Sequential:
    weights = ParameterFactory(0, tp, Axis("ep", None, tp.meter), mesh)
    return nn.Sequential(
        *(
            TransformerBlock(Parts(weights, model, KnobValues(), tp.meter), layer)
            for layer in range(model.layers)
        )
    )


def same_weights(ours: nn.Module, theirs: nn.Module) -> None:
    with torch.no_grad():
        target = dict(theirs.named_parameters())
        for name, weight in ours.named_parameters():
            there = target[name if "norm" in name else f"{name}.weight"]
            there.to_local().copy_(local_weight(weight))


def measure(context: RankContext) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))
    tp = Axis("tp", mesh.get_group("tp"), Meter(LAYERS))
    for name, (width, heads, length) in SIZES.items():
        model = Model(LAYERS, width, heads, length, kv_heads=heads // 2)
        ours, theirs = with_ours(model, tp, mesh), with_torch(model, mesh)
        same_weights(ours, theirs)
        x = torch.randn(BATCH, length // TP, width, generator=torch.Generator().manual_seed(context.rank))

        def step_of_ours(x: Tensor = x, blocks: nn.Module = ours) -> Tensor:
            for _ in range(MICRO_BATCHES):
                out: Tensor = blocks(x)
                out.square().sum().backward()
            sum_over_tp([blocks], SimpleNamespace(tp=tp))
            return out

        def step_of_theirs(x: Tensor = x, blocks: nn.Module = theirs) -> Tensor:
            for _ in range(MICRO_BATCHES):
                out = blocks(DTensor.from_local(x, mesh, [Shard(1)], run_check=False)).to_local()
                out.square().sum().backward()
            return out

        torch.testing.assert_close(step_of_ours(), step_of_theirs(), rtol=1e-4, atol=1e-5)
        took: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(ROUNDS):
            for who, step in (("ours", step_of_ours), ("theirs", step_of_theirs)):
                dist.barrier()
                begin = time.perf_counter()
                step()
                took[who].append(time.perf_counter() - begin)
        if context.rank == 0:
            ms = {who: median(times[3:]) * 1e3 for who, times in took.items()}
            ratios = sorted(b / a for a, b in zip(took["ours"][3:], took["theirs"][3:], strict=True))
            print(
                f"  {name}: ours {ms['ours']:.1f} ms, parallelize_module {ms['theirs']:.1f} ms a step of "
                f"{MICRO_BATCHES} micro-batches; {median(ratios):.2f} times as fast "
                f"(quartiles {ratios[len(ratios) // 4]:.2f} to {ratios[3 * len(ratios) // 4]:.2f})",
                flush=True,
            )
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch(TP, measure, name_of_rank=str, hub="none", run="bench", run_dir=Path(folder))
