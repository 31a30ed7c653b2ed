"""Compares the number of bytes that the planner expects a forward pass to save for the backward pass with the size of
the tensor storages that are still alive after a forward pass."""

from itertools import chain

import pytest
import torch
from torch import Tensor

from engine.config.knob_values import KnobValues
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.loss import training_loss
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.context.context_parallel import ContextParallel
from engine.parallel.parameters import ParameterFactory
from engine.planner.memory import saved
from engine.planner.memory.peak import LayerBytes, saved_of_stage
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import layers_of_rank
from engine.planner.workload.transformer import Experts
from engine.train.batches.samples import further_targets
from tests.ranks.cases.case import EXPERT_CHOICE
from tests.ranks.cases.over_models import MLA, MTP
from tests.ranks.memory.live_storages import LiveStorages, SavedStorages
from tests.unit.engine.config.test_layout import DEMO

ALONE = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1"]
MODELS = {
    "dense": ["model.moe=none", "model.d_ff=96"],
    "wide heads": ["model.moe=none", "model.d_ff=96", "model.kv_heads=none", "model.vocab=1024"],
    "experts": [],
    "window": ["model.moe=none", "model.d_ff=96", "model.window=24"],
    "window of whole blocks": ["model.window=16", "model.kv_heads=none"],
    "latent attention": [*MLA, "model.moe=none", "model.d_ff=96"],
    "latent attention with wide values": [*MLA, "model.q_rank=none", "model.v_dim=40"],
    "latent attention of one width": [*MLA, "model.v_dim=24"],
    "norms of heads and biases": [
        "model.moe=none",
        "model.d_ff=96",
        "model.head_dim=32",
        "model.qk_norm=true",
        "model.bias=true",
    ],
    "documents": ["model.moe=none", "model.d_ff=96", "model.window=24", "data.separate_documents=true"],
    "documents with latent attention and new positions": [
        *[*MLA, "model.v_dim=24", "model.moe=none", "model.d_ff=96"],
        *["data.separate_documents=true", "data.reset_positions=true"],
    ],
    "shared experts and z-loss": ["model.moe.shared_experts=1", "knobs.z_loss_coef=0.1"],
    "top 1 without a loss": [
        "model.moe.top_k=1",
        "model.moe.balance=bias",
        "model.moe.dense_layers=1",
    ],
    "both balances and groups": [
        "model.moe.balance=aux+bias",
        "model.moe.groups=4",
        "model.moe.top_groups=2",
        "model.moe.score=sigmoid",
    ],
    "capacity": ["knobs.capacity_factor=1.0"],
    "capacity by probability": ["knobs.capacity_factor=0.7", "model.moe.drop=probability"],
    "expert choice": [*EXPERT_CHOICE, "model.moe.top_k=1", "knobs.z_loss_coef=0.1"],
    "expert choice of four times the tokens": [*EXPERT_CHOICE, "knobs.capacity_factor=3.9"],
    "expert choice of all tokens": [*EXPERT_CHOICE, "knobs.capacity_factor=8.0"],
    "multi-token prediction": [*MTP, "model.moe.dense_layers=1"],
    "multi-token prediction with latent attention": [*MTP, *MLA, "model.tie_embeddings=true", *EXPERT_CHOICE],
}
PLANS = ("keep", "ends")  # storages that dispatch plans keep, not autograd
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSS = 4  # size of a scalar loss in bytes


class OneStage:
    """The model of a layout as a single pipeline stage in this process, with weights of the dtype
    that `train.precision` names."""

    def __init__(self, overrides: list[str]):
        layout = load(DEMO, [*ALONE, *overrides])
        model, tp = layout.model, Axis("tp", None, Meter())
        experts = model.moe.experts if model.moe else 0
        context = ContextParallel(Axis("cp", None, Meter()), tp, "ring", layout.data.reset_positions)
        factory = ParameterFactory(1, tp, Axis("ep", None, Meter()), context=context)
        meter = Meter(model.prediction_layers.stop, experts)
        self.stage = Stage(factory, model, range(model.layers), KnobValues.of(layout), meter)
        for parameter in self.stage.parameters():
            parameter.data = parameter.data.to(DTYPES[layout.train.precision])
        self.job, self.tp = Job.of(layout), tp
        self.tokens = torch.randint(0, 256, (self.job.micro_batch, model.seq_len))
        self.starts = torch.zeros_like(self.tokens) if layout.data.separate_documents else None
        self.targets = further_targets(self.tokens, model.mtp_layers) if model.mtp_layers else self.tokens

    def loss(self) -> Tensor:
        logits = self.stage(self.tokens, self.starts, self.targets if self.stage.mtp else None)
        return training_loss(logits, self.targets, self.tp, 1.0, 0.3)

    def planned(self) -> int:
        return int(sum(saved_of_stage(LayerBytes(self.job), 0, masked=True).values()))

    def plans(self) -> int:
        """Bytes of the storages that only dispatch plans keep."""
        entries = [saved.saved_of_layer(self.job, layer) for layer in layers_of_rank(self.job, 0).elements()]
        return int(sum(entry.bytes for entry in chain(*entries) if entry.name in PLANS))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.exhaustive), "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_byte_that_a_forward_keeps(model: str, precision: str, recompute: str) -> None:
    one = OneStage([*MODELS[model], f"train.precision={precision}", f"knobs.recompute={recompute}"])
    with LiveStorages() as live:
        loss = one.loss()
        kept = live.now() if loss.requires_grad else 0  # measured while `loss` keeps the graph alive
    # The auxiliary losses of a layer are scalars that exist in addition to the saved storages.
    layers = layers_of_rank(one.job, 0).elements()
    scalars = 2 * LOSS * sum(isinstance(layer.mlp, Experts) for layer in layers)
    assert one.planned() + LOSS <= kept <= one.planned() + LOSS + scalars


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_autograd_saves_the_same(model: str, precision: str) -> None:
    one = OneStage([*MODELS[model], f"train.precision={precision}"])
    with SavedStorages(one.stage) as storages:
        one.loss()
    assert storages.bytes == one.planned() - one.plans()
