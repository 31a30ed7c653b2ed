"""Temporary memory, in addition to the saved tensors, during the backward pass of one layer and while the loss is
computed.

The backward pass of a layer needs the most memory while it runs through the activation function of the MLP or the
experts. At that point, the gradients with respect to the function's inputs are allocated (two tensors of the hidden
width if the function is gated), and the saved input of the next matmul is already freed. With full recompute, all saved
tensors of the layer exist again; with selective recompute, only the saved tensors of attention do.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod as size

from engine.planner.memory import saved, saved_megatron
from engine.planner.memory.saved import Saved
from engine.planner.memory.sizes import FP32, LOSS_CHUNK, Rows, Sizes
from engine.planner.workload.job import Job
from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    StateSpace,
)
from engine.planner.workload.weights import layer_weights


def layer_working(job: Job, layer: Layer) -> float:
    """Temporary bytes while the backward pass runs through a layer: the maximum over its MLP and its attention. The
    tensors that the MLP saved are freed before the backward pass of attention."""
    lists = saved if job.framework == "engine" else saved_megatron
    kept = lists.saved_of_layer(job, layer)
    all_ = lists.saved_of_layer(replace(job, recompute="none", recomputed=()), layer)
    attention, mlp = _bytes(all_, "attention"), _bytes(all_, "mlp", "moe")
    stream = Sizes.of(job).slice_tokens * job.model.d_model * Sizes.of(job).stream
    in_mlp = _mlp_working(job, layer.mlp) + stream + _largest_gradient(job, layer)
    in_attention = _mixer_working(job, layer.mixer) + 2 * stream - (0.0 if job.recompute == "full" else mlp)
    if job.recompute == "full":
        in_mlp += attention + mlp - _bytes(kept, "moe")
        in_attention += attention
    elif job.recompute == "selective" or job.recomputed:
        in_mlp += mlp - _bytes(kept, "mlp", "moe") if job.recomputed else 0.0
        in_attention += attention - _bytes(kept, "attention")
    return max(0.0, in_mlp, in_attention)


def loss_working(job: Job) -> float:
    """Temporary bytes while the loss is computed. The engine processes one chunk of tokens at a time. For each chunk,
    the engine allocates the logits minus their maximum in fp32 and, if the logits are not in fp32, an fp32 copy of the
    logits. Megatron-LM allocates the logits and their fp32 copy in the forward pass, and the gradient of the logits in
    both precisions in the backward pass."""
    sizes = Sizes.of(job)
    logits = (1 + job.model.mtp_layers) * sizes.tokens * job.model.vocab / sizes.tp
    if job.framework == "engine":
        return min(logits, LOSS_CHUNK) * FP32 * (1 if sizes.stream == FP32 else 2)
    copies = FP32 + (sizes.stream if sizes.stream != FP32 else 0)
    return logits * copies


def _mlp_working(job: Job, mlp: FeedForward | None) -> float:
    sizes = Sizes.of(job)
    match mlp:
        case None:
            return 0.0
        case Dense():
            return (2 if mlp.gated else 1) * sizes.tokens * mlp.hidden / sizes.tp * sizes.stream
        case Experts():
            rows = Rows.of(job, mlp)
            hidden = (2 if mlp.gated else 1) * rows.received * mlp.hidden / job.etp * sizes.stream
            outputs = rows.sent * job.model.d_model * sizes.stream if job.framework == "engine" else 0.0
            return max(0.0, hidden - outputs)


def _mixer_working(job: Job, mixer: Mixer | None) -> float:
    """Bytes of the gradients with respect to queries, keys, values and the attention output."""
    sizes = Sizes.of(job)
    match mixer:
        case None:
            width = 0.0
        case Attention():
            width = 2.0 * (mixer.heads + mixer.kv_heads) * mixer.head_dim
        case LatentAttention():
            width = 2.0 * mixer.heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
        case StateSpace():
            width = 3.0 * mixer.heads * mixer.head_dim
    return sizes.tokens * width / sizes.tp * sizes.stream


def _largest_gradient(job: Job, layer: Layer) -> float:
    """Bytes of the gradient of the layer's largest weight. This gradient is allocated and then added to the accumulated
    gradient. Megatron-LM accumulates inside the matmul, so it allocates no such gradient."""
    if job.framework == "megatron":
        return 0.0
    weights = layer_weights(job.model, layer)
    largest = max(
        (
            size(weight.local_shape(job.grid.tp, job.grid.ep, job.etp))
            for weight in weights
            if weight.part in ("dense", "experts")
        ),
        default=0,
    )
    return largest * Sizes.of(job).stream


def _bytes(entries: Iterable[Saved], *kinds: str) -> float:
    return sum(entry.bytes for entry in entries if entry.kind in kinds)
