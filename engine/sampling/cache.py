"""Attention caches: keys and values, or latents, of earlier tokens, so that only new tokens run through the model.

Grouped-query attention keeps keys and values of this tp rank's heads. Latent attention keeps the whole latent and the
rotated shared key on each tp rank. They take r + R elements per token and layer, for all heads together.

Sequence parallelism stays on, so a pass is padded to a multiple of tp tokens. The padding follows the new tokens; it is
removed before attention and is not cached.

Shapes: B sequences, Q new tokens, K positions including the new ones, s tokens of this rank's slice of the padded pass,
D model, H query heads and G key heads of this tp rank, C width of a query or key head, N width of its part without
position, R width of its rotary part, V width of a value head, r width of the latent.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.flash_attention import cached_attention, causal_attention
from engine.kernels.window_attention import window_attention
from engine.model.attention import Attention, rotate
from engine.model.latent_attention import LatentAttention
from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.local_shards import local_shard


class KeyValueCache:
    """Keys and values of one layer with grouped-query attention, [2, B, G, positions, C]."""

    def __init__(self, attention: Attention, batch: int, positions: int, dtype: torch.dtype):
        self._attention = attention
        C, device = attention.head_dim, attention.rope.device
        G = len(local_shard(attention.k)) // C
        self.stored = torch.zeros(2, batch, G, positions, C, dtype=dtype, device=device)

    def attend(self, x_BsD: Tensor, start: int, count: int) -> Tensor:
        """Attention of `count` new tokens from position `start` over all positions so far, [B, s, D]. Caches their
        keys and values."""
        attention, end = self._attention, start + count
        x_BSD = gather_sequence(x_BsD, attention.tp)
        heads = attention.heads(x_BSD[:, :count], attention.rope[:, start:end])
        q, k, v = (x.transpose(1, 2) for x in heads)
        keys, values = self.stored
        keys[:, :, start:end], values[:, :, start:end] = k, v
        if start == 0:
            out = window_attention(q, k, v, attention.window)
        else:
            scale = attention.head_dim**-0.5
            out = cached_attention(q, keys[:, :, :end], values[:, :, :end], scale, attention.window)
        return attention.output(_padded(out, x_BSD.shape[1]))


class LatentCache:
    """Normalised latents and rotated shared keys of one layer with latent attention, [B, positions, r + R].

    The first pass expands keys and values of all heads, as training does. Later passes work on the latents: the
    up-projection of keys is applied to the queries, and the up-projection of values is applied to the output
    (DeepSeek-V2, section 2.1.2). So a pass reads r + R elements of each position instead of H (C + V).
    """

    def __init__(self, attention: LatentAttention, batch: int, positions: int, dtype: torch.dtype):
        self._attention = attention
        width = attention.kv_rank + attention.rope_dim
        self.stored = torch.zeros(batch, positions, width, dtype=dtype, device=attention.rope.device)

    def attend(self, x_BsD: Tensor, start: int, count: int) -> Tensor:
        """Attention of new tokens over all positions so far; see `KeyValueCache.attend`."""
        attention, end = self._attention, start + count
        parts = attention.gathered(x_BsD)
        padded = parts[0].shape[1]
        q_BQX, latent, key_BQR = (part[:, :count] for part in parts)
        rope = attention.rope[:, start:end]
        rotated = rotate(key_BQR.unsqueeze(2), rope).squeeze(2)
        self.stored[:, start:end] = torch.cat((latent, rotated), -1)
        if start == 0:
            q, k, v = (x.transpose(1, 2) for x in attention.expanded(q_BQX, latent, key_BQR, rope))
            out = causal_attention(q, k, v)
        else:
            out = self._over_latents(attention.queries(q_BQX), rope, end)
        return attention.output(_padded(out, padded))

    def _over_latents(self, q_BQHC: Tensor, rope: Tensor, end: int) -> Tensor:
        attention = self._attention
        N, V, r = attention.nope, attention.v_dim, attention.kv_rank
        up_k, up_v = torch.split(local_shard(attention.kv_up).view(-1, N + V, r), [N, V], 1)
        q_nope, q_rope = torch.split(q_BQHC, [N, attention.rope_dim], -1)
        q_latent = torch.einsum("bqhn,hnr->bhqr", q_nope, up_k)
        queries = torch.cat((q_latent, rotate(q_rope, rope).transpose(1, 2)), -1)
        # One key head serves all query heads; its values are its first r columns.
        keys = self.stored[:, None, :end]
        out = cached_attention(queries, keys, keys, attention.q_dim**-0.5)[..., :r]
        return torch.einsum("bhqr,hvr->bhqv", out, up_v)


Cache = KeyValueCache | LatentCache


def cache_of(attention: Attention | LatentAttention, batch: int, positions: int, dtype: torch.dtype) -> Cache:
    if isinstance(attention, LatentAttention):
        return LatentCache(attention, batch, positions, dtype)
    return KeyValueCache(attention, batch, positions, dtype)


def _padded(out_BHQV: Tensor, tokens: int) -> Tensor:
    return F.pad(out_BHQV, (0, 0, 0, tokens - out_BHQV.shape[2]))
