"""Sizes of one micro-batch on one rank, from which the bytes of all saved tensors are computed."""

from dataclasses import dataclass

from engine.config.sizes import expert_capacity
from engine.planner.workload.job import Job, Precision
from engine.planner.workload.transformer import Experts

FP32, INT64, BOOL, MASK = 4, 8, 1, 1

LOSS_CHUNK = 1 << 22
"""Logits that the engine's loss converts to fp32 at a time (`engine/model/loss.py`)."""

STREAM: dict[Precision, float] = {"fp32": 4, "bf16": 2, "fp8": 2, "nvfp4": 2}
"""Bytes per element of activations between matmuls."""

OPERAND: dict[Precision, float] = {"fp32": 4, "bf16": 2, "fp8": 1, "nvfp4": 0.5625}
"""Bytes per element of a matmul's saved input, which is quantised if the matmul is. NVFP4 stores a one-byte
scale for every 16 elements."""


@dataclass(frozen=True)
class Sizes:
    """`tokens`: number of tokens in the rank's cp slice, which attention and dense MLPs process. `slice_tokens`: number
    of tokens in the rank's residual stream; with sequence parallelism, the cp slice is split further over tp. `stream`:
    bytes per element of the residual stream. `operand`: bytes per element of the saved inputs of matmuls."""

    batch: int
    seq_len: int
    tokens: float
    slice_tokens: float
    stream: float
    operand: float
    tp: int
    cp: int

    @classmethod
    def of(cls, job: Job) -> "Sizes":
        tokens = job.micro_batch * job.seq_len / job.grid.cp
        return cls(
            job.micro_batch,
            job.seq_len,
            tokens,
            job.local_tokens,
            STREAM[job.precision],
            OPERAND[job.precision],
            job.grid.tp,
            job.grid.cp,
        )


@dataclass(frozen=True)
class Rows:
    """For one layer, the number of (token, expert) pairs that this rank sends, and the number that the busiest ep rank
    receives. `candidates`: number of experts between which a token's pairs are decided: its top-k, or all experts if
    experts choose tokens. `limited`: whether some of the candidates may not become pairs.

    Without dropping, the busiest rank receives `imbalance` times the mean number of pairs. A capacity limits both
    values: no expert takes more than `capacity_factor` times an even share. If experts choose tokens, they all take as
    many as the capacity allows. Without ep, the engine allocates as many rows as the capacity of all experts for the
    rank's tokens allows, because it does not wait for the number of pairs.
    """

    sent: float
    received: float
    candidates: int
    limited: bool

    @classmethod
    def of(cls, job: Job, mlp: Experts) -> "Rows":
        pairs, experts = job.local_tokens * mlp.top_k, mlp.experts
        if job.framework == "megatron":
            if not job.sequence_parallel:
                pairs /= job.grid.tp  # all tp ranks have the same tokens, and each dispatches a part of them
            sent = pairs * job.pairs_run
            # With etp, ranks that share an expert gather the rows of all of them.
            return cls(sent, sent * job.busiest_rank * job.etp, mlp.top_k, job.capacity_factor is not None)
        if job.capacity_factor is None and not job.expert_choice:
            return cls(pairs, pairs * job.imbalance, mlp.top_k, False)
        candidates = experts if job.expert_choice else mlp.top_k
        capacity = expert_capacity(job.capacity_factor or 1.0, job.seq_len, mlp.top_k, experts)
        share = capacity * experts / (job.seq_len * mlp.top_k)
        if job.grid.ep == 1:
            most = experts * min(job.micro_batch * capacity, job.local_tokens)
            sent = received = min(job.local_tokens * candidates, most)
        elif job.expert_choice:
            sent = received = pairs * share
        else:
            sent, received = pairs * min(1.0, share), pairs * min(job.imbalance, share)
        return cls(sent, received, candidates, True)
