"""How many numbers a model learns. Torch-free, and quick whatever the sizes."""

from engine.config.layout import Model


def parameter_count(model: Model, active: bool = False) -> int:
    """All of them, whatever they are sharded over; `active`: of routed experts only those that a token visits."""
    D, H, G = model.d_model, model.heads * model.head_dim, model.kv * model.head_dim
    attention = 2 * D * H + 2 * D * G + 2 * D  # with the layer's two norms
    routed = len(model.layers_with_experts)
    if model.moe:
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if active else moe.experts)
        experts = D * moe.experts + 3 * D * moe.d_expert * visited
    else:
        experts = 0
    ends = D * model.vocab * (1 if model.tie_embeddings else 2) + D
    return ends + model.layers * attention + routed * experts + (model.layers - routed) * 3 * D * model.ff
