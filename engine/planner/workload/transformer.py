"""A transformer as the planner describes it: a sequence of layers, each with a token mixer and a feed-forward part.

This description also covers published models that the engine does not train, such as those with state-space mixers.
Layers with the same description compare equal, so the cost of each kind of layer is computed only once.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from engine.config.sections.model import Model, Moe


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention. `window`: maximum number of keys that a query attends to; None: all earlier keys.
    `qk_norm`: each query and key head has an RMSNorm (Qwen3). `sinks`: a learned logit per head in the softmax
    (gpt-oss). `qkv_bias`: biases of queries, keys and values (Qwen2). `bias`: biases of queries, keys, values and the
    output."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). The fields `..._rank` and `..._dim` are
    numbers of elements per token or per head. If `q_rank` is None, queries are projected directly from the layer's
    input, without a latent."""

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class StateSpace:
    """A Mamba-2 mixer (arXiv 2405.21060): `heads` heads of dimension `head_dim`, and `groups` groups of B and C with
    `state` elements each."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int = 4


@dataclass(frozen=True)
class Dense:
    """An MLP of hidden width `hidden`. A gated MLP (SwiGLU) has three matrices, others have two."""

    hidden: int
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Experts:
    """Routed experts of hidden width `hidden`, and shared experts of total hidden width `shared_hidden`.

    `latent`: width to which tokens are projected before dispatch (LatentMoE); None: they are not projected. A token
    chooses its experts from `top_groups` of `groups` equal groups (node-limited routing).
    """

    experts: int
    top_k: int
    hidden: int
    shared_hidden: int = 0
    gated: bool = True
    latent: int | None = None
    groups: int = 1
    top_groups: int = 1


Mixer = Attention | LatentAttention | StateSpace
FeedForward = Dense | Experts


@dataclass(frozen=True)
class Layer:
    """One residual layer. Hybrid models have layers without a mixer or without a feed-forward part."""

    mixer: Mixer | None
    mlp: FeedForward | None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash is cached, because layers are keys of many dictionaries."""
        return hash((self.mixer, self.mlp))


@dataclass(frozen=True)
class Transformer:
    """The whole model. `norm_parameters`: parameters of a norm per feature, 1 for RMSNorm and 2 for LayerNorm.
    `positions`: number of rows of a learned position embedding; 0: positions are rotary. `mtp_layers`: extra layers
    that predict further tokens (DeepSeek-V3)."""

    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    tied: bool = False
    norm_parameters: int = 1
    positions: int = 0
    mtp_layers: int = 0

    @cached_property
    def kinds(self) -> Counter[Layer]:
        """The kinds of layers in the model, each with the number of layers of this kind."""
        return Counter(self.layers)

    @property
    def experts(self) -> list[Experts]:
        """The experts of each kind of layer that has some."""
        return [layer.mlp for layer in self.kinds if isinstance(layer.mlp, Experts)]

    @property
    def routed(self) -> bool:
        """Whether any layer has experts."""
        return bool(self.experts)

    @classmethod
    def of(cls, model: Model) -> "Transformer":
        """The transformer that a layout's section [model] describes."""
        mixer = _mixer(model)
        dense = Layer(mixer, Dense(model.ff, model.gated, model.bias))
        routed = Layer(mixer, _experts(model.moe, model.gated)) if model.moe else dense
        layers = tuple(routed if model.has_experts(layer) else dense for layer in range(model.layers))
        return cls(
            model.d_model,
            model.vocab,
            layers,
            model.tie_embeddings,
            norm_parameters=2 if model.norm == "layernorm" else 1,
            positions=model.seq_len if model.positions == "learned" else 0,
            mtp_layers=model.mtp_layers,
        )


def _mixer(model: Model) -> Attention | LatentAttention:
    if model.attention == "gqa":
        return Attention(
            model.heads,
            model.kv,
            model.head_width,
            window=model.window,
            bias=model.bias,
            qkv_bias=model.qkv_bias,
            qk_norm=model.qk_norm,
        )
    q_rank, kv_rank, nope, rope, v = model.latent
    return LatentAttention(model.heads, q_rank or None, kv_rank, nope, rope, v)


def _experts(moe: Moe, gated: bool) -> Experts:
    return Experts(
        moe.experts,
        moe.top_k,
        moe.d_expert,
        shared_hidden=moe.shared_experts * moe.d_expert,
        gated=gated,
        groups=moe.groups,
        top_groups=moe.top_groups or moe.groups,
    )
