"""FLOPs of a training step: model FLOPs, and hardware FLOPs, which include recomputation.

A multiply-add counts as 2 FLOPs. The backward pass takes twice as many FLOPs as the forward pass, because it computes
the gradients of both operands of a matmul (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; PaLM, arXiv 2204.02311,
appendix B). Matmuls, the router and attention are counted; norms, biases and the embedding lookup are not.

Under a causal mask a query attends to half of the keys on average, and only these keys count by default. Published
figures often count all keys (PaLM's 12 S H C per token and layer; Narayanan et al. 2021, arXiv 2104.04473, equation 3).
With `causal=False`, the functions in this module do the same.
"""

from engine.config import sizes
from engine.planner.workload.job import Job
from engine.planner.workload.transformer import (
    Attention,
    LatentAttention,
    Layer,
    Mixer,
    StateSpace,
    Transformer,
)
from engine.planner.workload.weights import Weight, end_weights, layer_weights

MULTIPLY_ADD = 2
FORWARD_AND_BACKWARD = 3  # in forwards
LOOKED_UP = ("embedding", "positions", "conv")  # two-dimensional weights that no matmul uses
UP_PROJECTIONS = ("q_up", "kv_up")  # of latent attention
SCAN = 7  # FLOPs of the Mamba-2 scan per inner channel and state element, as Megatron-LM counts them


def mean_keys(seq_len: int, window: int | None = None, causal: bool = True) -> float:
    """Mean number of keys that a query of the sequence attends to."""
    return sizes.mean_keys(seq_len, window) if causal else min(seq_len, window or seq_len)


def mixing_flops(mixer: Mixer | None, seq_len: int, causal: bool = True) -> float:
    """Forward FLOPs per token of a mixer's operations without weights: the attention scores and the weighted sum of
    values, or the state-space scan."""
    match mixer:
        case Attention():
            keys = mean_keys(seq_len, mixer.window, causal)
            return MULTIPLY_ADD * keys * mixer.heads * 2 * mixer.head_dim
        case LatentAttention():
            # Only inference uses the absorbed form (one latent key for all heads); training expands keys and values.
            width = mixer.nope_dim + mixer.rope_dim + mixer.v_dim
            return MULTIPLY_ADD * mean_keys(seq_len, None, causal) * mixer.heads * width
        case StateSpace():
            return SCAN * mixer.heads * mixer.head_dim * mixer.state
        case None:
            return 0.0


def weight_flops(weights: tuple[Weight, ...]) -> float:
    """Forward FLOPs per token of the matmuls with these weights."""
    multiplied = (weight for weight in weights if len(weight.shape) == 2 and weight.name not in LOOKED_UP)
    return float(MULTIPLY_ADD * sum(weight.active for weight in multiplied))


def layer_flops(model: Transformer, layer: Layer, seq_len: int, causal: bool = True) -> float:
    """Forward FLOPs per token of a layer, if no token is dropped."""
    return weight_flops(layer_weights(model, layer)) + mixing_flops(layer.mixer, seq_len, causal)


def head_flops(model: Transformer) -> float:
    """Forward FLOPs per token of the head, with tied or untied weights. Multi-token prediction runs the head once more
    for each further token that it predicts."""
    return float(MULTIPLY_ADD * model.d_model * model.vocab)


def forward_flops(model: Transformer, seq_len: int, causal: bool = True) -> float:
    """Forward FLOPs per token of the whole model, with the layers and heads of multi-token prediction."""
    layers = sum(layer_flops(model, layer, seq_len, causal) * n for layer, n in model.kinds.items())
    further = model.mtp_layers and model.mtp_layers * layer_flops(model, model.layers[-1], seq_len, causal)
    return layers + further + end_flops(model)


def end_flops(model: Transformer) -> float:
    """Forward FLOPs per token after the layers: one pass through the head, and for each layer of multi-token
    prediction, the projection of hidden state and embedding and a further pass."""
    projection = weight_flops(end_weights(model).prediction)
    return head_flops(model) + model.mtp_layers * (projection + head_flops(model))


def token_flops(model: Transformer, seq_len: int, causal: bool = True) -> float:
    """Model FLOPs per token in forward and backward passes, as counted in model FLOPs utilisation (MFU)."""
    return FORWARD_AND_BACKWARD * forward_flops(model, seq_len, causal)


def step_flops(job: Job, causal: bool = True) -> float:
    """Model FLOPs of a step over all ranks, without recomputation and without dropped tokens."""
    return job.tokens * token_flops(job.model, job.seq_len, causal)


def hardware_flops(job: Job, causal: bool = True) -> float:
    """FLOPs of a step over all ranks, including recomputation in the backward pass.

    As in published figures, the attention scores that a fused kernel recomputes in its own backward pass are not
    counted.
    """
    again = sum(recomputed_flops(job, layer, causal) * n for layer, n in job.model.kinds.items())
    if job.model.mtp_layers:
        again += job.model.mtp_layers * recomputed_flops(job, job.model.layers[-1], causal)
    return step_flops(job, causal) + job.tokens * again


def recomputed_flops(job: Job, layer: Layer, causal: bool = True) -> float:
    """FLOPs per token that the backward pass spends on recomputing operations of `layer`.

    Mode "full" recomputes the whole layer. Mode "selective" recomputes scores, softmax and the weighted sum of values
    in Megatron-LM (Korthikanti et al. 2022, arXiv 2205.05198, section 5), and the whole attention block with its
    projections in the engine.
    """
    match job.recompute:
        case "none" if "latent" in job.recomputed and isinstance(layer.mixer, LatentAttention):
            return weight_flops(tuple(w for w in layer_weights(job.model, layer) if w.name in UP_PROJECTIONS))
        case "full":
            return layer_flops(job.model, layer, job.seq_len, causal)
        case "selective" if isinstance(layer.mixer, (Attention, LatentAttention)):
            if job.framework == "megatron":
                return mixing_flops(layer.mixer, job.seq_len, causal)
            return layer_flops(job.model, Layer(layer.mixer, None), job.seq_len, causal)
        case _:
            return 0.0
