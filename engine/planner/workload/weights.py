"""The weights of each kind of layer: names, shapes, and how tensor and expert parallelism split them.

Shapes are [out, in]; D is the width of the residual stream. Megatron-LM and the engine split most weights in the same
way, so both are described by the same list. Where Megatron-LM and the engine differ, the code that uses the list checks
`Job.framework`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod
from typing import Literal, NamedTuple

from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    FeedForward,
    LatentAttention,
    Layer,
    Mixer,
    StateSpace,
    Transformer,
)

Division = Literal["rows", "columns", "whole", "experts"]
Part = Literal["mixer", "dense", "router", "shared", "experts", "latent", "norm", "embedding", "head", "mtp"]
# Names of the matrices of an MLP, by whether it is gated.
MATRICES = {True: ("gate", "up", "down"), False: ("up", "down")}


@dataclass(frozen=True)
class Weight:
    """One weight. `division`: how the weight is split. "rows" and "columns": over tp; "whole": not split, every tp rank
    holds the whole weight; "experts": one matrix per expert, with the experts split over ep and each matrix over etp.

    `heads`: for weights of keys and values, the number of KV heads; at most this many tp ranks hold different shards,
    and any further tp ranks hold copies. `copies`: number of matrices with this shape, such
    as one per expert; `visited`: number of these matrices that a token uses.
    """

    part: Part
    name: str
    shape: tuple[int, ...]
    division: Division
    copies: int = 1
    visited: int = 1
    heads: int | None = None

    @property
    def size(self) -> int:
        return self.copies * prod(self.shape)

    @property
    def active(self) -> int:
        return self.visited * prod(self.shape)

    def local_shape(self, tp: int, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
        """The shape on one rank, before data parallelism shards it."""
        match self.division:
            case "whole":
                return self.shape
            case "experts":
                return (ceil(self.copies / ep), self.shape[0], ceil(self.shape[1] / etp))
            case "rows":
                return (ceil(self.shape[0] / min(tp, self.heads or tp)), *self.shape[1:])
            case "columns":
                return (self.shape[0], ceil(self.shape[1] / tp))


class Ends(NamedTuple):
    """Weights outside the layers: those of the embedding with learned positions, of the last norm and the head, and
    those that each module of multi-token prediction has besides its layer. `head` has only the last norm if the head is
    tied to the embedding; `prediction` is empty if there is no multi-token prediction."""

    embedding: tuple[Weight, ...]
    head: tuple[Weight, ...]
    prediction: tuple[Weight, ...]


def layer_weights(model: Transformer, layer: Layer) -> tuple[Weight, ...]:
    """The weights of a layer, including norms."""
    return _layer_weights(model.d_model, model.norm_parameters, layer)


@lru_cache(maxsize=4096)
def _layer_weights(D: int, scale: int, layer: Layer) -> tuple[Weight, ...]:
    weights: list[Weight] = []
    if layer.mixer:
        weights += [_norm("mixer_norm", D * scale), *_mixer(layer.mixer, D)]
    if layer.mlp:
        weights += [_norm("mlp_norm", D * scale), *_feed_forward(layer.mlp, D)]
    return tuple(weights)


def end_weights(model: Transformer) -> Ends:
    """Weights of the embedding, positions, last norm and head, and those of a module of multi-token prediction.

    Each module of multi-token prediction projects the normalised hidden state and the embedding of the next token with
    a matrix [D, 2 D], then applies a transformer layer and a norm. The modules use the model's embedding and head
    (DeepSeek-V3, arXiv 2412.19437, section 2.2).
    """
    D, V, scale = model.d_model, model.vocab, model.norm_parameters
    embedding = [Weight("embedding", "embedding", (V, D), "rows")]
    if model.positions:
        embedding.append(Weight("embedding", "positions", (model.positions, D), "whole"))
    head = [_norm("last_norm", D * scale)]
    if not model.tied:
        head.append(Weight("head", "head", (V, D), "rows"))
    prediction: list[Weight] = []
    if model.mtp_layers:
        prediction += [_norm(name, D * scale) for name in ("state_norm", "embedding_norm", "last_norm")]
        prediction.append(Weight("mtp", "joint", (D, 2 * D), "rows"))
    return Ends(tuple(embedding), tuple(head), tuple(prediction))


def prediction_weights(model: Transformer) -> tuple[Weight, ...]:
    """The weights of all modules of multi-token prediction, each with a layer like the model's last."""
    return model.mtp_layers * (*end_weights(model).prediction, *layer_weights(model, model.layers[-1]))


def _mixer(mixer: Mixer, D: int) -> list[Weight]:
    match mixer:
        case Attention():
            return _attention(mixer, D)
        case LatentAttention():
            return _latent_attention(mixer, D)
        case StateSpace():
            return _state_space(mixer, D)


def _attention(mixer: Attention, D: int) -> list[Weight]:
    H, G = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    weights = [
        Weight("mixer", "q", (H, D), "rows"),
        Weight("mixer", "k", (G, D), "rows", heads=mixer.kv_heads),
        Weight("mixer", "v", (G, D), "rows", heads=mixer.kv_heads),
        Weight("mixer", "o", (D, H), "columns"),
    ]
    if mixer.bias or mixer.qkv_bias:
        weights += [
            Weight("mixer", "q_bias", (H,), "rows"),
            Weight("mixer", "k_bias", (G,), "rows", heads=mixer.kv_heads),
            Weight("mixer", "v_bias", (G,), "rows", heads=mixer.kv_heads),
        ]
    if mixer.bias:
        weights.append(Weight("mixer", "o_bias", (D,), "whole"))
    if mixer.qk_norm:
        weights += [_norm("q_norm", mixer.head_dim), _norm("k_norm", mixer.head_dim)]
    return weights


def _latent_attention(mixer: LatentAttention, D: int) -> list[Weight]:
    """The weights of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, equations 9-19). The down-projections
    are on every tp rank, as in Megatron-LM."""
    queries = mixer.heads * (mixer.nope_dim + mixer.rope_dim)
    if mixer.q_rank is None:
        weights = [Weight("mixer", "q", (queries, D), "rows")]
    else:
        weights = [
            Weight("mixer", "q_down", (mixer.q_rank, D), "whole"),
            _norm("q_norm", mixer.q_rank),
            Weight("mixer", "q_up", (queries, mixer.q_rank), "rows"),
        ]
    return [
        *weights,
        Weight("mixer", "kv_down", (mixer.kv_rank + mixer.rope_dim, D), "whole"),
        _norm("kv_norm", mixer.kv_rank),
        Weight("mixer", "kv_up", (mixer.heads * (mixer.nope_dim + mixer.v_dim), mixer.kv_rank), "rows"),
        Weight("mixer", "o", (D, mixer.heads * mixer.v_dim), "columns"),
    ]


def _state_space(mixer: StateSpace, D: int) -> list[Weight]:
    """The weights of Mamba-2, arXiv 2405.21060, section 7.1, and its public code: one projection to z, x, B, C and dt,
    a convolution with bias over x, B and C, three scalars per head (A, D, dt bias), a gated norm, and the output
    projection."""
    inner, BC = mixer.heads * mixer.head_dim, 2 * mixer.groups * mixer.state
    return [
        Weight("mixer", "in", (2 * inner + BC + mixer.heads, D), "rows"),
        Weight("mixer", "conv", (inner + BC, mixer.conv), "rows"),
        Weight("mixer", "conv_bias", (inner + BC,), "rows"),
        *(Weight("mixer", name, (mixer.heads,), "rows") for name in ("A", "skip", "dt_bias")),
        Weight("norm", "gated_norm", (inner,), "rows"),
        Weight("mixer", "out", (D, inner), "columns"),
    ]


def _feed_forward(mlp: FeedForward, D: int) -> list[Weight]:
    match mlp:
        case Dense():
            return _mlp("dense", mlp.hidden, D, mlp.gated, mlp.bias)
        case Experts():
            return _experts(mlp, D)


def _mlp(part: Part, hidden: int, D: int, gated: bool, bias: bool) -> list[Weight]:
    into, out = MATRICES[gated][:-1], MATRICES[gated][-1]
    weights = [Weight(part, name, (hidden, D), "rows") for name in into]
    weights.append(Weight(part, out, (D, hidden), "columns"))
    if bias:
        weights += [Weight(part, f"{name}_bias", (hidden,), "rows") for name in into]
        weights.append(Weight(part, f"{out}_bias", (D,), "whole"))
    return weights


def _experts(mlp: Experts, D: int) -> list[Weight]:
    """The router always reads vectors of width D. With `latent`, the routed experts read a projection of the residual
    stream, and a second projection maps their output back."""
    width = mlp.latent or D
    weights = [Weight("router", "router", (mlp.experts, D), "whole")]
    weights += [
        Weight("experts", name, (width, mlp.hidden), "experts", mlp.experts, mlp.top_k)
        for name in MATRICES[mlp.gated]
    ]
    if mlp.latent:
        weights.append(Weight("latent", "into_latent", (mlp.latent, D), "whole"))
        weights.append(Weight("latent", "from_latent", (D, mlp.latent), "whole"))
    if mlp.shared_hidden:
        weights += _mlp("shared", mlp.shared_hidden, D, mlp.gated, bias=False)
    return weights


def _norm(name: str, size: int) -> Weight:
    return Weight("norm", name, (size,), "whole")
