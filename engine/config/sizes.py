"""Parameter counts from a model's sizes. Torch-free. The computing time does not depend on the sizes."""

from engine.config.layout import Model


def parameter_count(model: Model, active: bool = False) -> int:
    """Parameters of the whole, unsharded model; if `active` is True, only those that one token uses, with top_k routed
    experts per layer."""
    D, H, G = model.d_model, model.heads * model.head_dim, model.kv * model.head_dim
    attention = 2 * D * H + 2 * D * G + 2 * D  # includes the two norms of the layer
    routed = len(model.layers_with_experts)
    if model.moe:
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if active else moe.experts)
        experts = D * moe.experts + 3 * D * moe.d_expert * visited
    else:
        experts = 0
    ends = D * model.vocab * (1 if model.tie_embeddings else 2) + D
    return ends + model.layers * attention + routed * experts + (model.layers - routed) * 3 * D * model.ff
