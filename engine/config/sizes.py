"""Counts a model's parameters from its sizes, such as `d_model` and the number of layers. Torch-free. The counts are
closed-form expressions, so they are as fast to compute for a huge model as for a small one."""

from math import ceil

from engine.config.sections.model import Model


def parameter_count(model: Model, active: bool = False) -> int:
    """The number of parameters of the whole, unsharded model. `active`: count only the routed experts that one token
    uses (top_k). As in model cards, the layers of multi-token prediction are not counted.
    """
    D, norm = model.d_model, model.d_model * (2 if model.norm == "layernorm" else 1)
    layer = attention_matrices(model) + _attention_vectors(model) + 2 * norm
    routed = len(model.layers_with_experts)
    if model.moe:
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if active else moe.experts)
        experts = D * moe.experts + mlp_matrices(model, moe.d_expert) * visited
    else:
        experts = 0
    dense = mlp_matrices(model, model.ff)
    if model.bias:
        dense += (2 if model.gated else 1) * model.ff + D
    positions = D * model.seq_len if model.positions == "learned" else 0
    ends = D * model.vocab * (1 if model.tie_embeddings else 2) + positions + norm
    return ends + model.layers * layer + routed * experts + (model.layers - routed) * dense


def mlp_matrices(model: Model, hidden: int) -> int:
    """Number of elements in the weight matrices of one dense MLP, or of one expert, with hidden width `hidden`."""
    return (3 if model.gated else 2) * model.d_model * hidden


def attention_matrices(model: Model) -> int:
    """Number of elements in the matrices of one attention block."""
    D = model.d_model
    if model.attention == "gqa":
        return 2 * D * model.head_width * (model.heads + model.kv)
    q_rank, kv_rank, nope, rope, v = model.latent
    queries = model.heads * (nope + rope)
    into_queries = q_rank * (D + queries) if q_rank else D * queries
    keys = D * (kv_rank + rope) + kv_rank * model.heads * (nope + v)
    return into_queries + keys + model.heads * v * D


def expert_capacity(factor: float, seq_len: int, top_k: int, experts: int) -> int:
    """Maximum number of (token, expert) pairs that one expert processes per sequence of `seq_len` tokens: `factor`
    times the mean number of pairs of an expert, rounded up (Switch Transformer, arXiv 2101.03961, section 2.2), but at
    most all tokens, because an expert never gets a token twice."""
    return min(seq_len, ceil(factor * seq_len * top_k / experts))


def mean_keys(seq_len: int, window: int | None = None) -> float:
    """Mean number of keys that a query attends to under the causal mask."""
    keys = min(seq_len, window or seq_len)
    return keys * (1 - keys / (2 * seq_len))


def attention_width(model: Model) -> int:
    """Multiply-adds of attention per query-key pair, summed over heads: the scores and the weighted sum of values."""
    if model.attention == "gqa":
        return 2 * model.heads * model.head_width
    _, _, nope, rope, v = model.latent
    return model.heads * (nope + rope + v)


def _attention_vectors(model: Model) -> int:
    """Number of elements in the biases and the query and key norms of one attention block."""
    if model.attention == "mla":
        q_rank, kv_rank, *_ = model.latent
        return q_rank + kv_rank
    biases = model.head_width * (model.heads + 2 * model.kv) if model.biased_qkv else 0
    biases += model.d_model if model.bias else 0
    return biases + (2 * model.head_width if model.qk_norm else 0)
