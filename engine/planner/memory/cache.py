"""Bytes of the KV cache used for text generation (docs/train/sampling.md)."""

from engine.config.sections.model import Model


def cache_width(model: Model, tp: int) -> int:
    """Number of elements that a tp rank caches per token and layer: the keys and values of its heads, or, with latent
    attention, the whole latent and the shared rotary key.
    """
    if model.attention == "mla":
        _, kv_rank, _, rope_dim, _ = model.latent
        return kv_rank + rope_dim
    return 2 * model.kv // tp * model.head_width


def cache_bytes(model: Model, layers: int, tp: int, positions: int, batch: int, item_bytes: int) -> int:
    """Cache bytes of a rank with `layers` layers, for `batch` sequences of `positions` tokens."""
    return layers * batch * positions * cache_width(model, tp) * item_bytes
