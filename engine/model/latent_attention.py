"""Multi-head latent attention (MLA), as in DeepSeek-V2 (arXiv 2405.04434, section 2.1) and DeepSeek-V3.

Queries, keys and values are projected up from narrow latents. A query or key head has a part without positional
encoding and a rotary part; all heads share one rotary key. Training expands the latents to the keys and values of all
heads. Only decoding computes attention directly on the latents.

Shapes: B sequences, S tokens of this rank's cp slice, s = S/tp tokens of its tp slice, D model width, H heads of this
tp rank, N non-rotary and R rotary dimensions of a head, C = N + R head dimension of queries and keys, V head dimension
of values.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from engine.config.sections.model import Model
from engine.model.attention import rope_table, rotate
from engine.model.rms_norm import RMSNorm
from engine.parallel.autograd_collectives import gather_sequence, scatter_sequence
from engine.parallel.context.documents import Documents
from engine.parallel.local_shards import linear
from engine.parallel.parameters import ParameterFactory


class LatentAttention(nn.Module):
    """Causal latent attention. Heads are split over tp, the sequence over cp.

    Every tp rank holds the down-projections in full and applies them to its slice of the sequence. Then the latents,
    which have q_rank + kv_rank + R elements per token instead of D, are gathered over tp (as in Megatron-LM).
    """

    def __init__(self, factory: ParameterFactory, name: str, model: Model, out_std: float):
        super().__init__()
        self.tp, self.context = factory.tp, factory.context
        q_rank, self.kv_rank, self.nope, self.rope_dim, self.v_dim = model.latent
        D, H = model.d_model, model.heads
        self.q_dim, eps = self.nope + self.rope_dim, model.latent_norm_eps or model.norm_eps
        self.q: nn.Parameter | None = None
        self.q_down: nn.Parameter | None = None
        if q_rank:
            self.q_down = factory.replicated(f"{name}.q_down", (q_rank, D), 0.02)
            self.q_norm = RMSNorm(factory, q_rank, eps)
            self.q_up = factory.sharded(f"{name}.q_up", (H * self.q_dim, q_rank), 0.02, 0)
        else:
            self.q = factory.sharded(f"{name}.q", (H * self.q_dim, D), 0.02, 0)
        self.kv_down = factory.replicated(f"{name}.kv_down", (self.kv_rank + self.rope_dim, D), 0.02)
        self.kv_norm = RMSNorm(factory, self.kv_rank, eps)
        self.kv_up = factory.sharded(f"{name}.kv_up", (H * (self.nope + self.v_dim), self.kv_rank), 0.02, 0)
        self.o = factory.sharded(f"{name}.o", (D, H * self.v_dim), out_std, 1)
        table = rope_table(model.seq_len, self.rope_dim, model.rope_theta)
        table = table[:, self.context.rope_positions(model.seq_len)]
        self.register_buffer("rope", table.to(factory.device), persistent=False)
        self.rope: Tensor
        self._joined = factory.compiled(queries_and_keys)
        # While text is generated, this function attends to cached tokens (`engine.sampling.cache`).
        self.cached: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_BsD: Tensor, documents: Documents | None = None) -> Tensor:
        if self.cached is not None:
            return self.cached(x_BsD)
        rope = documents.rope(self.rope) if documents else self.rope
        q, k, v = (x.transpose(1, 2) for x in self.expanded(*self.gathered(x_BsD), rope))
        return self.output(self.context.attend(q, k, v, None, documents))

    def queries(self, q_BSX: Tensor) -> Tensor:
        """Queries of this tp rank before rotation, [B, S, H, C]. `q_BSX` is the first of the three tensors from
        `gathered`."""
        q = linear(q_BSX, self.q_up if self.q is None else self.q)
        return q.view(*q.shape[:2], -1, self.q_dim)

    def expanded(
        self, q_BSX: Tensor, latent: Tensor, key_BSR: Tensor, rope: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, S, H, C] and values [B, S, H, V], from the three tensors that `gathered` returns. `rope`
        is the RoPE table of the positions (`rope_table`)."""
        kv = linear(latent, self.kv_up).view(*latent.shape[:2], -1, self.nope + self.v_dim)
        k_nope, v = torch.split(kv, [self.nope, self.v_dim], -1)
        return *self._joined(self.queries(q_BSX), k_nope, key_BSR, rope), v

    def output(self, out_BHSV: Tensor) -> Tensor:
        """The output of all heads for this rank's slice, [B, s, D]."""
        return scatter_sequence(linear(out_BHSV.transpose(1, 2).flatten(2), self.o), self.tp)

    def gathered(self, x_BsD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Three tensors for the whole cp slice: the input of the projection to queries, the latent of keys and values,
        and the rotary key before rotation."""
        latent, key = torch.split(linear(x_BsD, self.kv_down), [self.kv_rank, self.rope_dim], -1)
        queries = x_BsD if self.q_down is None else self.q_norm(linear(x_BsD, self.q_down))
        parts = queries, self.kv_norm(latent), key
        if self.tp.size == 1:
            return parts
        gathered = gather_sequence(torch.cat(parts, -1), self.tp)  # one collective for all three
        q_BSX, latent, key_BSR = torch.split(gathered, [part.shape[-1] for part in parts], -1)
        return q_BSX, latent, key_BSR


def queries_and_keys(q_BSHC: Tensor, k_BSHN: Tensor, key_BSR: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the rotary part of each query (its last R elements), and copy the rotated shared key to each head. Returns
    queries and keys, each [B, S, H, C]."""
    N, R = k_BSHN.shape[-1], key_BSR.shape[-1]
    q_nope, q_rope = torch.split(q_BSHC, [N, R], -1)
    key = rotate(key_BSR.unsqueeze(2), table).expand(-1, -1, k_BSHN.shape[2], -1)
    return torch.cat((q_nope, rotate(q_rope, table)), -1), torch.cat((k_BSHN, key), -1)
