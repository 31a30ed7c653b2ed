"""What the backward of one layer, or the loss, holds for itself beside what was saved.

At the widest point of a layer's backward, in the activation function of its MLP or experts, the gradients of its inputs
exist, two widths of the hidden layer when it is gated, and the saved input of the product behind it is already gone.
With full recompute the layer's saved tensors exist again, with selective recompute those of attention.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod as size

from engine.planner.memory import saved, saved_megatron
from engine.planner.memory.saved import Saved
from engine.planner.memory.sizes import FP32, Rows, Sizes
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
    """Bytes beside the saved ones while backward runs through a layer: in its MLP, or later in its attention, when what
    the MLP had saved is gone."""
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
    """Bytes beside the saved ones while the loss is computed, in forward or in backward: the logits and an fp32 copy
    of them if they are not fp32, or their gradient in fp32 and in the logits' precision."""
    sizes = Sizes.of(job)
    logits = sizes.tokens * job.model.vocab / sizes.tp
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
    """Gradients of queries, keys and values, and of attention's output."""
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
    """The gradient of the layer's largest weight, before it is added to its sum. Megatron-LM's products add to it
    directly."""
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
