"""Causal grouped-query attention with rotary position embedding (RoPE).

Shapes: B sequences, S tokens of this rank's cp slice (the whole sequence with cp = 1), s = S/tp tokens of its tp slice,
D model width, H query heads and G key heads, C head dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from engine.config.sections.model import Model
from engine.model.rms_norm import RMSNorm
from engine.parallel.autograd_collectives import gather_sequence, scatter_sequence
from engine.parallel.context.documents import Documents
from engine.parallel.local_shards import linear
from engine.parallel.parameters import ParameterFactory


def rope_table(seq_len: int, head_dim: int, theta: float) -> Tensor:
    """The cos and sin tables of rotary position embedding, [2, S, 1, C] (Su et al. 2021). `rotate` returns the sum of
    two products: a head vector times the cos table, and the same vector with its two halves swapped times the sin
    table. The sin table contains -sin in its first half and sin in its second half."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), inverse)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    return table.unsqueeze(2).to(torch.get_default_dtype())


NARROW = 64
"""Width of a head below which `rotate` copies the table for each head on a CPU. Without the copies, torch multiplies
one head at a time, which takes four times as long for heads of 16 elements."""


def rotate(x_BSHC: Tensor, table: Tensor) -> Tensor:
    """Rotate each pair of elements (one from each half of the head) by the angle of its position, in the table's
    precision. Backward rotates the gradient by the opposite angle.
    """
    if torch.compiler.is_compiling():
        return _rotated(x_BSHC, table)
    out: Tensor = _Rotation.apply(x_BSHC, table)  # type: ignore[no-untyped-call]
    return out


def _rotated(x_BSHC: Tensor, table: Tensor, sign: int = 1) -> Tensor:
    cos, sin = table
    swapped = x_BSHC.roll(x_BSHC.shape[-1] // 2, -1)
    return torch.addcmul(x_BSHC * cos, swapped, sin, value=sign).to(x_BSHC.dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHC: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return _rotated(x_BSHC, _by_head(table, x_BSHC))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _rotated(grad, _by_head(ctx.saved_tensors[0], grad), -1), None


def _by_head(table: Tensor, x_BSHC: Tensor) -> Tensor:
    """`table` expanded to one copy per head of `x` if this makes the rotation faster (narrow heads on the CPU); else
    `table` unchanged."""
    heads, width = x_BSHC.shape[-2:]
    if table.ndim > 4 or width >= NARROW or table.device.type != "cpu":
        return table
    return table.expand(-1, -1, heads, -1).contiguous()


def rotate_both(q_BSHC: Tensor, k_BSGC: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q_BSHC, table), rotate(k_BSGC, table)


class Attention(nn.Module):
    """Causal grouped-query attention. Heads are split over tp, the sequence over cp."""

    def __init__(self, factory: ParameterFactory, name: str, model: Model, out_std: float):
        super().__init__()
        self.tp, self.context, self.head_dim = factory.tp, factory.context, model.head_width
        D, C, self.window = model.d_model, model.head_width, model.window
        self.q = factory.sharded(f"{name}.q", (model.heads * C, D), 0.02, 0)
        self.k = factory.sharded(f"{name}.k", (model.kv * C, D), 0.02, 0)
        self.v = factory.sharded(f"{name}.v", (model.kv * C, D), 0.02, 0)
        self.o = factory.sharded(f"{name}.o", (D, model.heads * C), out_std, 1)
        self.q_bias: nn.Parameter | None = None
        self.k_bias: nn.Parameter | None = None
        self.v_bias: nn.Parameter | None = None
        self.o_bias: nn.Parameter | None = None
        if model.biased_qkv:
            self.q_bias = factory.zeros((model.heads * C,), 0)
            self.k_bias, self.v_bias = factory.zeros((model.kv * C,), 0), factory.zeros((model.kv * C,), 0)
        if model.bias:
            self.o_bias = factory.zeros((D,))
        self.q_norm, self.k_norm = (
            RMSNorm(factory, C, model.norm_eps) if model.qk_norm else None for _ in range(2)
        )
        table = rope_table(model.seq_len, C, model.rope_theta)
        table = table[:, self.context.rope_positions(model.seq_len)]
        self.register_buffer("rope", table.to(factory.device), persistent=False)
        self.rope: Tensor
        self._rotated = factory.compiled(rotate_both)
        # While text is generated, this function attends to cached tokens (`engine.sampling.cache`).
        self.cached: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_BsD: Tensor, documents: Documents | None = None) -> Tensor:
        if self.cached is not None:
            return self.cached(x_BsD)
        rope = documents.rope(self.rope) if documents else self.rope
        q, k, v = self.heads(gather_sequence(x_BsD, self.tp), rope)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.output(self.context.attend(q, k, v, self.window, documents))

    def heads(self, x_BSD: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, S, H, C], keys and values [B, S, G, C] of this tp rank. `rope` is the RoPE table of the positions
        (`rope_table`)."""
        # q, k and v have separate matmuls: concatenating their weights would copy them in each layer and micro-batch
        # and keep the copy for the backward pass.
        q, k, v = (
            linear(x_BSD, weight, bias).view(*x_BSD.shape[:2], -1, self.head_dim)
            for weight, bias in ((self.q, self.q_bias), (self.k, self.k_bias), (self.v, self.v_bias))
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return *self._rotated(q, k, rope), v

    def output(self, out_BHSC: Tensor) -> Tensor:
        """The output of all heads for this rank's slice, [B, s, D]."""
        out = scatter_sequence(linear(out_BHSC.transpose(1, 2).flatten(2), self.o), self.tp)
        return out if self.o_bias is None else out + self.o_bias
