"""A training job as the planner describes it: model, grid, schedule, batch and settings. A job is made from a layout,
or constructed directly.
"""

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from typing import Any, Literal

from engine.config.compression import CompressionValues
from engine.config.grid import Grid
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.config.schedule_traits import stages_of_rank
from engine.config.sections.assumptions import Module
from engine.planner.layer_split import split_layers
from engine.planner.workload.transformer import Transformer

UNKNOWN_MODEL = (
    "the planner does not know your own model (model.implementation = {}), so its memory, time and traffic are "
    "unknown; legal: transformer"
)

Precision = Literal["fp32", "bf16", "fp8", "nvfp4"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Job:
    """The training job whose step time, memory and traffic the planner predicts; a step is one optimizer update. Batch
    sizes are in sequences, other sizes in elements.

    `etp`: number of tp ranks that share each expert; always 1 in the engine. `split[s]`: number of layers of stage s;
    None: layers are divided as evenly as possible. `imbalance`: highest load of an ep rank divided by the mean load.
    `master`: fp32 master weights are kept in addition to the weights that the matmuls use. `framework`: the framework
    whose sharding and saved activations are assumed. `fused_attention`: scores stay on the chip (FlashAttention),
    matmuls add to the weight gradients directly, and the loss has fused kernels; otherwise separate kernels pass these
    values through device memory, as in Megatron-LM before 2023. `gradients`: precision in which a rank accumulates
    gradients over micro-batches in mixed-precision training. `recomputed`: cheap parts of a layer that the backward
    pass recomputes (`recomputed.py`). `aux_loss` and `z_loss`: whether the router has these losses.

    `overlap_experts`: all-to-alls of one micro-batch run while another micro-batch computes. `deduplicated`: a token is
    sent to another node only once, even if several of its experts are there (DeepEP). `graphs`: parts of a layer
    (mixer, router, experts) whose kernels are launched by CUDA graphs. `grouped`: one kernel computes the matmuls of
    all experts. `adapters`: only small adapters are trained (LoRA), so the model's weights have no gradients.

    `router_scores`: whether routers gather all scores of a sequence. `router_counts`: how many times a router gathers
    its counts of (token, expert) pairs in each forward pass. `bias_balance`: the router balances the experts' loads
    with biases (docs/evidence/bytes.md). `expert_choice`: experts choose tokens. `compression`: how the engine's
    replicas compress gradients (docs/train/compression.md). `averaged`: an exponential moving average of the weights is
    kept. `token_bytes`: bytes per token in the token shards that training reads; 0: the text is in memory. `documents`:
    attention stays within documents, and with "reset", positions restart at each document. `saves`: whether the run
    saves checkpoints.
    """

    model: Transformer
    seq_len: int
    global_batch: int
    micro_batch: int
    grid: Grid = field(default_factory=Grid)
    etp: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    split: tuple[int, ...] | None = None
    precision: Precision = "bf16"
    recompute: Recompute = "none"
    zero: int = 2
    optimizer: Literal["adamw", "sgd"] = "adamw"
    master: bool = True
    cp_method: Literal["ulysses", "ring"] = "ring"
    ep_inner: int | None = None
    capacity_factor: float | None = None
    imbalance: float = 1.0
    sequence_parallel: bool = True
    framework: Literal["engine", "megatron"] = "megatron"
    fused_attention: bool = True
    dropout: bool = False
    gradients: Literal["fp32", "bf16"] = "fp32"
    recomputed: tuple[Module, ...] = ()
    aux_loss: bool = True
    z_loss: bool = False
    overlap_experts: bool = False
    deduplicated: bool = False
    graphs: tuple[str, ...] = ()
    grouped: bool = False
    adapters: bool = False
    router_scores: bool = False
    router_counts: int = 0
    bias_balance: bool = False
    averaged: bool = False
    token_bytes: int = 0
    expert_choice: bool = False
    compression: CompressionValues = field(default_factory=CompressionValues)
    documents: Literal["", "separate", "reset"] = ""
    saves: bool = False

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per step on a data-parallel rank."""
        return ceil(self.global_batch / self.grid.dp / self.micro_batch)

    @property
    def tokens(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch * self.seq_len

    @property
    def local_tokens(self) -> float:
        """Tokens of a micro-batch in one rank's part of the residual stream. The tokens are split over cp and, with
        sequence parallelism, also over tp."""
        shared = self.grid.cp * (self.grid.tp if self.sequence_parallel else 1)
        return self.micro_batch * self.seq_len / shared

    @property
    def efsdp(self) -> int:
        """Number of ranks over which data parallelism shards an expert, within one stage and one replica."""
        return max(1, self.grid.fsdp * self.grid.tp // (self.grid.ep * self.etp))

    @property
    def pairs_run(self) -> float:
        """The number of (token, expert) pairs that experts process, as a multiple of tokens x top_k. It differs from 1
        if pairs are dropped or padding is added. All experts are assumed to have equal loads. An expert that chooses
        tokens can choose at most all of them.

        Megatron-LM pads each expert to its capacity, and under expert choice each expert fills its capacity. With token
        choice, the engine drops the pairs that exceed an expert's capacity, but adds no padding. With equal loads, no
        expert exceeds its capacity if the capacity factor is at least 1, so such a factor does not change the number of
        pairs.
        """
        factor = self.capacity_factor or 1.0
        if self.expert_choice:
            factor = min([factor, *(mlp.experts / mlp.top_k for mlp in self.model.experts)])
        return factor if self._fills_capacity else min(1.0, factor)

    @property
    def busiest_rank(self) -> float:
        """The number of (token, expert) pairs that the busiest ep rank processes, divided by the mean over the ep
        ranks."""
        if self.capacity_factor is None:
            return self.imbalance
        return 1.0 if self._fills_capacity else min(self.imbalance, self.capacity_factor) / self.pairs_run

    @property
    def _fills_capacity(self) -> bool:
        return self.framework == "megatron" or self.expert_choice

    @property
    def stages(self) -> int:
        return self.grid.pp * self.virtual_stages

    @cached_property
    def parts(self) -> list[range]:
        """The layers of each stage."""
        if self.split is None:
            layers, stages = len(self.model.layers), self.stages
            sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        else:
            sizes = list(self.split)
        starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    def stages_of(self, pp: int) -> list[int]:
        """The stages of pipeline rank `pp`."""
        return stages_of_rank(self.schedule, pp, self.grid.pp, self.virtual_stages)

    @classmethod
    def of(cls, layout: Layout) -> "Job":
        """The job that a checked layout describes. The engine keeps fp32 weights and casts them for the matmuls;
        Megatron-LM keeps weights in the precision of the matmuls and, in addition, in fp32. Raises RefusedError for a
        model whose costs the planner does not know."""
        if layout.model.own:
            raise RefusedError(UNKNOWN_MODEL.format(layout.model.implementation))
        megatron = layout.plan.framework == "megatron"
        parts = [] if layout.plan.split else split_layers(layout.model, layout.stages)
        return cls(
            model=Transformer.of(layout.model),
            seq_len=layout.model.seq_len,
            global_batch=layout.train.global_batch,
            micro_batch=layout.local_batch // layout.knobs.micro_batches,
            grid=layout.ranks,
            schedule=layout.schedule.name,
            virtual_stages=layout.virtual_stages,
            split=layout.plan.split or tuple(len(part) for part in parts),
            precision=planned_precision(layout.train.precision),
            recompute=layout.knobs.recompute,
            zero=layout.train.zero,
            optimizer=layout.train.optimizer,
            master=megatron,
            cp_method=layout.grid.cp_method,
            ep_inner=layout.ep_inner,
            capacity_factor=layout.knobs.capacity_factor,
            imbalance=layout.plan.imbalance,
            framework=layout.plan.framework,
            recomputed=layout.plan.modules,
            sequence_parallel=layout.plan.sequence_parallel,
            fused_attention=layout.plan.fused_attention,
            overlap_experts=layout.plan.overlap_experts,
            deduplicated=layout.plan.deduplicated,
            grouped=layout.plan.grouped,
            aux_loss=layout.model.moe is not None and "aux" in layout.model.moe.balances,
            z_loss=layout.knobs.z_loss_coef > 0,
            averaged=layout.train.ema is not None,
            token_bytes=_token_bytes(layout),
            documents=_documents(layout),
            saves=layout.checkpoint.every > 0,
            expert_choice=layout.model.moe is not None and layout.model.moe.router == "expert_choice",
            compression=layout.compression.values(),
            **_router_gathers(layout),
        )


def _documents(layout: Layout) -> Literal["", "separate", "reset"]:
    if not layout.data.separate_documents:
        return ""
    return "reset" if layout.data.reset_positions else "separate"


def _token_bytes(layout: Layout) -> int:
    """Bytes per token in token shards. The number depends on the vocabulary size (engine.data.shards.DTYPES)."""
    if layout.data.source != "shards":
        return 0
    return next(size for size in (1, 2, 4) if layout.model.vocab <= 2 ** (8 * size))


def planned_precision(precision: str) -> Precision:
    """The precision for which the planner computes tensor sizes and execution times; fp16 is planned as bf16."""
    known: dict[str, Precision] = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16", "fp8": "fp8"}
    return known[precision]


def _router_gathers(layout: Layout) -> dict[str, Any]:
    """Values for the fields of `Job` that describe what the model's routers exchange: the scores or token counts that a
    router gathers from the ranks with the other slices of a sequence (docs/evidence/bytes.md, tp), and whether the
    experts' loads are summed for balancing with biases."""
    moe = layout.model.moe
    if moe is None:
        return {}
    limited = layout.knobs.capacity_factor is not None
    scores = moe.router == "expert_choice" or (limited and moe.drop == "probability")
    counted = not scores and (limited or moe.balances == ["aux"])
    both = moe.balances == ["aux", "bias"]  # the counts for the loss differ from those of the chosen experts
    return {"router_scores": scores, "router_counts": counted + both, "bias_balance": "bias" in moe.balances}
