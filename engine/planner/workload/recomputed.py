"""Parts of a layer that the backward pass recomputes, because recomputing them saves much memory for little time.

"norm" recomputes the outputs of norms; "latent" recomputes queries, keys and values from the latents of MLA, with the
up-projections; "activation" recomputes the output of SwiGLU or GELU. DeepSeek-V3 (arXiv 2412.19437, sections 3.2.3 and
3.3.3) and Megatron-Core (--recompute-modules) can recompute all three parts.
"""

from engine.planner.workload.job import Job
from engine.planner.workload.operations import Gemm, Memory, Operation
from engine.planner.workload.transformer import Dense, Experts, LatentAttention, Layer

BF16 = 2  # bytes


def recomputed_work(job: Job, layer: Layer) -> tuple[Operation, ...]:
    """The recomputed operations of one layer and micro-batch, for the parts listed in `job.recomputed`."""
    operations: list[Operation] = []
    tokens, D = job.micro_batch * job.seq_len / job.grid.cp, job.model.d_model
    if "norm" in job.recomputed:
        norms = (layer.mixer is not None) + (layer.mlp is not None)
        operations += [Memory(BF16 * 2 * job.local_tokens * D, 1)] * norms
    if "latent" in job.recomputed and isinstance(layer.mixer, LatentAttention):
        mixer, heads = layer.mixer, layer.mixer.heads / job.grid.tp
        qk = mixer.nope_dim + mixer.rope_dim
        if mixer.q_rank:
            operations.append(Gemm(tokens, heads * qk, mixer.q_rank))
        operations.append(Gemm(tokens, heads * (mixer.nope_dim + mixer.v_dim), mixer.kv_rank))
        joined = tokens * heads * (2 * qk + mixer.v_dim)
        operations.append(Memory(BF16 * 2 * joined, 4))
    if "activation" in job.recomputed:
        operations += [Memory(BF16 * numbers, 1) for numbers in _activations(job, layer, tokens)]
    return tuple(operations)


def _activations(job: Job, layer: Layer, tokens: float) -> list[float]:
    """How many elements each activation function reads and writes."""
    match layer.mlp:
        case Dense(hidden, gated):
            return [(3 if gated else 2) * tokens * hidden / job.grid.tp]
        case Experts() as mlp:
            width = 3 if mlp.gated else 2
            rows = job.local_tokens * mlp.top_k * job.imbalance
            shared = tokens * mlp.shared_hidden / job.grid.tp
            return [width * rows * mlp.hidden, *([width * shared] if shared else [])]
        case None:
            return []
