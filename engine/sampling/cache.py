"""Attention caches: keys and values, or latents, of earlier tokens, so that only new tokens run through the model.

Grouped-query attention caches the keys and values of this tp rank's heads. Latent attention caches the whole latent and
the rotated shared key on each tp rank. The latent and the key together have r + R elements per token and layer,
whatever the number of heads.

Sequence parallelism is used, so the tokens of a pass are padded to a multiple of tp. The padding follows the new
tokens; it is removed before attention and is not cached.

Shapes: B sequences, Q new tokens, K positions including the new ones, s tokens (with padding) of this rank's slice, D
model width, H query heads and G key heads of this tp rank, C head dimension of queries and keys, N of their non-rotary
part, R of their rotary part, V head dimension of values, r elements of the latent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config.sections.model import Model
from engine.kernels.flash_attention import cached_attention, causal_attention
from engine.kernels.window_attention import window_attention
from engine.model.attention import Attention, rope_table, rotate
from engine.model.latent_attention import LatentAttention
from engine.model.stage import Stage
from engine.model.transformer import TransformerBlock
from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.local_shards import local_shard


class Caches:
    """The caches of all layers of a rank's `stages`, for `batch` sequences of at most `positions` tokens.

    `length` is the number of tokens that the caches hold. The caches have their own rotary factors, for all positions,
    because the layers of a cp rank have only the factors of the rank's slice.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        model: Model,
        batch: int,
        positions: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        width = model.latent[3] if model.attention == "mla" else model.head_width
        rope = rope_table(positions, width, model.rope_theta).to(device)
        blocks = [block for stage in stages for block in stage.layers.values()]
        self._layers: list[tuple[Attention | LatentAttention, KeyValueCache | LatentCache]] = []
        for block in blocks:
            assert isinstance(block, TransformerBlock), "text is generated only with the built-in model"
            attention = block.attention
            if isinstance(attention, LatentAttention):
                self._layers.append((attention, LatentCache(attention, rope, batch, dtype)))
            else:
                heads = model.kv // attention.tp.size
                self._layers.append((attention, KeyValueCache(attention, rope, batch, heads, dtype)))
        self.length, self.dtype = 0, dtype

    @property
    def bytes(self) -> int:
        return sum(cache.stored.untyped_storage().nbytes() for _, cache in self._layers)

    @contextmanager
    def next(self, count: int) -> Iterator[None]:
        """Context manager: in its body, the stages run a forward pass on the next `count` tokens of each sequence,
        using and extending the caches. The stages take these tokens as input, padded to a multiple of `tp`."""
        for attention, cache in self._layers:
            attention.cached = partial(cache.attend, start=self.length, count=count)
        try:
            yield
        finally:
            for attention, _ in self._layers:
                attention.cached = None
        self.length += count


class KeyValueCache:
    """Keys and values of one layer with grouped-query attention, [2, B, G, positions, C]. `rope` contains the rotary
    factors of all positions."""

    def __init__(self, attention: Attention, rope: Tensor, batch: int, heads: int, dtype: torch.dtype):
        self._attention, self._rope = attention, rope
        shape = 2, batch, heads, rope.shape[1], attention.head_dim
        self.stored = torch.zeros(shape, dtype=dtype, device=rope.device)

    def attend(self, x_BsD: Tensor, start: int, count: int) -> Tensor:
        """Run attention for `count` new tokens, the first at position `start`, over the cached and the new positions;
        returns [B, s, D]. Caches the keys and values of the new tokens."""
        attention, end = self._attention, start + count
        x_BSD = gather_sequence(x_BsD, attention.tp)
        heads = attention.heads(x_BSD[:, :count], self._rope[:, start:end])
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

    The first pass computes the keys and values of all heads from the latents, as training does. Later passes work on
    the latents: the up-projection of keys is applied to the queries, and the up-projection of values is applied to the
    output (DeepSeek-V2, section 2.1.2). So a pass reads r + R elements per position instead of H (C + V).
    """

    def __init__(self, attention: LatentAttention, rope: Tensor, batch: int, dtype: torch.dtype):
        self._attention, self._rope = attention, rope
        width = attention.kv_rank + attention.rope_dim
        self.stored = torch.zeros(batch, rope.shape[1], width, dtype=dtype, device=rope.device)

    def attend(self, x_BsD: Tensor, start: int, count: int) -> Tensor:
        """Attention of new tokens over all positions so far; see `KeyValueCache.attend`."""
        attention, end = self._attention, start + count
        parts = attention.gathered(x_BsD)
        padded = parts[0].shape[1]
        q_BQX, latent, key_BQR = (part[:, :count] for part in parts)
        rope = self._rope[:, start:end]
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


def _padded(out_BHQV: Tensor, tokens: int) -> Tensor:
    return F.pad(out_BHQV, (0, 0, 0, tokens - out_BHQV.shape[2]))
