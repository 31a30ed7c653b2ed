"""Layout sections for the transformer and its experts. Torch-free."""

from typing import Annotated, Literal

from msgspec import Struct

from engine.config.sections.bounds import (
    Above,
    Experts,
    FewLayers,
    Implementation,
    Layers,
    Natural,
    Positive,
)

BUILT_IN = "transformer"


class Moe(Struct, frozen=True):
    """Mixture of Experts (docs/train/routing.md). Without this section every layer has a dense MLP."""

    experts: Annotated[Experts, "routed experts per layer"]
    top_k: Annotated[Positive, "routed experts per token"]
    d_expert: Annotated[Positive, "hidden width of one expert"]
    dense_layers: Annotated[Natural, "leading layers without experts"] = 0
    every: Annotated[
        Positive, "after dense_layers, every n-th layer has experts, starting with the first"
    ] = 1
    shared_experts: Annotated[Natural, "experts that process every token, in addition to its top_k"] = 0
    router: Annotated[
        Literal["token_choice", "expert_choice"], "whether tokens choose experts or experts choose tokens"
    ] = "token_choice"
    score: Annotated[
        Literal["softmax", "sigmoid"], "score over all experts (softmax) or for each expert alone (sigmoid)"
    ] = "softmax"
    route_scale: Annotated[Above, "factor on the weights of the routed experts"] = 1.0
    balance: Annotated[
        Literal["aux", "bias", "aux+bias", "none"],
        "load balancing: an auxiliary loss per sequence, a bias on expert selection, both or none",
    ] = "aux"
    drop: Annotated[
        Literal["position", "probability"],
        "which tokens an expert keeps at its capacity: the first, or those with the highest probability",
    ] = "position"
    groups: Annotated[Positive, "number of expert groups of equal size"] = 1
    top_groups: Annotated[Positive | None, "expert groups that a token may use; absent: all"] = None

    @property
    def balances(self) -> list[str]:
        """The load-balancing methods in use, as a list that may contain "aux" and "bias"."""
        return [] if self.balance == "none" else self.balance.split("+")


class Model(Struct, frozen=True):
    """The transformer (docs/train/models.md). `activation` = gelu, `norm` = layernorm, `positions` = learned can
    be planned and simulated, but not trained yet."""

    layers: Annotated[Layers, "transformer layers"]
    d_model: Annotated[Positive, "width of the residual stream"]
    heads: Annotated[Positive, "query heads"]
    seq_len: Annotated[Positive, "tokens per sequence"]
    kv_heads: Annotated[Positive | None, "key and value heads; absent: as many as heads"] = None
    d_ff: Annotated[Positive | None, "hidden width of a dense MLP; absent: 4 d_model"] = None
    vocab: Annotated[Positive, "rows of the embedding; byte tokens use the first 256"] = 256
    norm_eps: Annotated[Above, "added to the mean square in RMSNorm"] = 1e-5
    rope_theta: Annotated[Above, "base of the rotary frequencies"] = 10_000.0
    tie_embeddings: Annotated[bool, "whether the head shares the embedding's weight"] = False
    attention: Annotated[
        Literal["gqa", "mla"], "grouped-query attention, or multi-head latent attention (DeepSeek-V2)"
    ] = "gqa"
    head_dim: Annotated[Positive | None, "width of a head with gqa; absent: d_model / heads"] = None
    q_rank: Annotated[
        Positive | None, "with mla: width of the latent queries; absent: queries are projected directly"
    ] = None
    kv_rank: Annotated[Positive | None, "with mla: width of the latent keys and values"] = None
    nope_dim: Annotated[Positive | None, "with mla: width of a head's key without position"] = None
    rope_dim: Annotated[Positive | None, "with mla: width of the rotary key that all heads share"] = None
    v_dim: Annotated[Positive | None, "with mla: width of a head's value"] = None
    latent_norm_eps: Annotated[
        Above | None, "with mla: norm_eps of the latents' norms (DeepSeek-V3: 1e-6); absent: norm_eps"
    ] = None
    window: Annotated[
        Positive | None,
        "sliding window (Mistral): number of newest keys that a query attends to, including its own; absent: all keys",
    ] = None
    max_seq_len: Annotated[
        Positive | None,
        "largest legal seq_len; `engine import-hf` sets it to the sliding window of a model (Qwen) in which only some "
        "layers have one; absent: no limit",
    ] = None
    qk_norm: Annotated[bool, "whether each query and key head has an RMSNorm (Qwen3)"] = False
    qkv_bias: Annotated[bool, "whether the projections to queries, keys and values have biases (Qwen2)"] = (
        False
    )
    bias: Annotated[bool, "whether attention and the dense MLP have biases"] = False
    activation: Annotated[
        Literal["swiglu", "gelu"],
        "activation of MLPs and experts: gated, with three matrices (swiglu), or plain, with two (gelu)",
    ] = "swiglu"
    norm: Annotated[Literal["rmsnorm", "layernorm"], "kind of norm; a layernorm has a bias too"] = "rmsnorm"
    positions: Annotated[Literal["rotary", "learned"], "RoPE, or an embedding of seq_len rows"] = "rotary"
    mtp_layers: Annotated[FewLayers, "layers of multi-token prediction (DeepSeek-V3)"] = 0
    implementation: Annotated[
        Implementation,
        "the built-in model, or your own; its code runs on each rank (docs/train/own_model.md)",
    ] = BUILT_IN
    moe: Moe | None = None

    @property
    def own(self) -> bool:
        """Whether the user supplies the model's code. If so, the engine learns the model's parameter counts and costs
        only from this code."""
        return self.implementation != BUILT_IN

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def ff(self) -> int:
        return self.d_ff or 4 * self.d_model

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.heads

    @property
    def biased_qkv(self) -> bool:
        return self.bias or self.qkv_bias

    @property
    def gated(self) -> bool:
        return self.activation == "swiglu"

    @property
    def latent(self) -> tuple[int, int, int, int, int]:
        """q_rank (0: none), kv_rank, nope_dim, rope_dim and v_dim of latent attention."""
        return (self.q_rank or 0, self.kv_rank or 0, self.nope_dim or 0, self.rope_dim or 0, self.v_dim or 0)

    @property
    def prediction_layers(self) -> range:
        """Layer indices of the multi-token prediction layers, which come after the model's own layers."""
        return range(self.layers, self.layers + self.mtp_layers)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts. A multi-token prediction layer has experts if the model's last layer does."""
        return self.moe is not None and min(layer, self.layers - 1) in self.layers_with_experts

    @property
    def layers_with_experts(self) -> range:
        return range(self.moe.dense_layers, self.layers, self.moe.every) if self.moe else range(0)
