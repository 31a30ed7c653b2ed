"""Flash attention over one block of keys, forward and backward, and merging of blocks by log-sum-exp.

Given the output and log-sum-exp over *all* keys, `backward` computes one block's exact contribution to the gradients
(Dao et al. 2022, algorithm 4). So a long sequence can be processed block by block, without its full score matrix.

Shapes: B sequences, H query heads, G KV heads (G divides H), Q queries, K keys, C head dimension of queries and keys, V
head dimension of values (C unless stated).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.precision import at_least_fp32

HALF = (torch.float16, torch.bfloat16)
ROWS = 512  # number of queries per chunk if there is no fused kernel


def causal_attention(q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor) -> Tensor:
    """Causal attention over the whole sequence, [B, H, S, V]; G divides H. Scores are scaled by 1/sqrt(C), where C is
    the head dimension of the queries, even if the values have another head dimension V.
    """
    C, V = q_BHSC.shape[-1], v_BGSC.shape[-1]
    q, k, v = of_equal_width(q_BHSC, k_BGSC, v_BGSC)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=C**-0.5)
    return out[..., :V]


def cached_attention(
    q_BHQC: Tensor, k_BGKC: Tensor, v_BGKV: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of the last Q positions of a sequence to its K keys, [B, H, Q, V]. Each query attends to all
    keys up to its position, or to the newest `window` of these keys. G divides H."""
    Q, K = q_BHQC.shape[2], k_BGKC.shape[2]
    unseen = 0 if window is None else max(0, K - Q + 1 - window)
    k, v = k_BGKC[:, :, unseen:], v_BGKV[:, :, unseen:]
    seen = None  # a single query needs no mask, because it attends to all keys in `k`
    if Q > 1:
        seen = torch.ones(Q, k.shape[2], dtype=torch.bool, device=q_BHQC.device).tril(k.shape[2] - Q)
        if window is not None:
            seen = seen.triu(k.shape[2] - Q - window + 1)
    return F.scaled_dot_product_attention(q_BHQC, k, v, attn_mask=seen, enable_gqa=True, scale=scale)


def of_equal_width(*tensors: Tensor) -> list[Tensor]:
    """The tensors, padded with zeros to the largest head dimension, because torch's fused kernels need equal head
    dimensions. The padding changes neither scores nor outputs."""
    width = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def forward(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKC: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, H, Q, V] and log-sum-exp of the scaled scores [B, H, Q]. `causal` requires Q = K."""
    if not (on_cpu := q_BHQC.device.type == "cpu") and not _cuda_kernel(q_BHQC):
        return plain_forward(q_BHQC, k_BGKC, v_BGKC, causal)
    V, scale = v_BGKC.shape[-1], q_BHQC.shape[-1] ** -0.5
    q, k, v = of_equal_width(q_BHQC, k_BGKC, v_BGKC)
    if on_cpu:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(q, k, v, 0.0, causal, scale=scale)
    else:
        k, v = (for_each_query_head(x, q) for x in (k, v))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse = kernel(q, k, v, 0.0, causal, scale=scale)[:2]
    return out[..., :V], lse


def backward(
    grad: Tensor, q_BHQC: Tensor, k_BGKC: Tensor, v_BGKC: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This block's contribution to the gradients of q, k and v. `out` and `lse` are the output and log-sum-exp over all
    blocks."""
    if not (on_cpu := q_BHQC.device.type == "cpu") and not _cuda_kernel(q_BHQC):
        return plain_backward(grad, q_BHQC, k_BGKC, v_BGKC, out, lse, causal)
    C, V = q_BHQC.shape[-1], v_BGKC.shape[-1]
    q, k, v, out, grad = of_equal_width(q_BHQC, k_BGKC, v_BGKC, out, grad)
    if on_cpu:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = kernel(grad, q, k, v, out, lse, 0.0, causal, scale=C**-0.5)
    else:
        k_H, v_H = (for_each_query_head(x, q) for x in (k, v))
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # dropout state; dropout is off
        lengths = (None, None, q.shape[2], k.shape[2])
        d_q, d_k, d_v = kernel(
            grad, q, k_H, v_H, out, lse, *lengths, 0.0, causal, seed, seed[0], scale=C**-0.5
        )
        d_k, d_v = _sum_of_query_heads(d_k, k), _sum_of_query_heads(d_v, v)
    return d_q[..., :C], d_k[..., :C], d_v[..., :V]


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the output and log-sum-exp of another block of keys (`more`, `more_lse`) into `out` and `lse`, in place."""
    total = torch.logaddexp(lse, more_lse)
    out.mul_((lse - total).exp().unsqueeze(-1))
    out.add_(more * (more_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)


def plain_forward(q_BHQC: Tensor, k_BGKC: Tensor, v_BGKC: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`forward` without a fused kernel; it processes ROWS queries at a time."""
    k, v = (for_each_query_head(x, q_BHQC) for x in (k_BGKC, v_BGKC))
    outs, lses = [], []
    for start in range(0, q_BHQC.shape[2], ROWS):
        scores = _scores(q_BHQC[:, :, start : start + ROWS], k, start, causal)
        lses.append(scores.logsumexp(-1))
        outs.append((scores - lses[-1].unsqueeze(-1)).exp().to(v.dtype) @ v)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def plain_backward(
    grad: Tensor, q_BHQC: Tensor, k_BGKC: Tensor, v_BGKC: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = (for_each_query_head(x, q_BHQC) for x in (k_BGKC, v_BGKC))
    d_q, d_k, d_v = (torch.zeros_like(x) for x in (q_BHQC, k, v))
    delta = (grad * out).sum(-1, dtype=lse.dtype).unsqueeze(-1)
    for start in range(0, q_BHQC.shape[2], ROWS):
        rows = (slice(None), slice(None), slice(start, start + ROWS))
        probs = (_scores(q_BHQC[rows], k, start, causal) - lse[rows].unsqueeze(-1)).exp()
        d_v += probs.to(v.dtype).mT @ grad[rows]
        d_scores = (probs * (grad[rows] @ v.mT - delta[rows]) / math.sqrt(k.shape[-1])).to(k.dtype)
        d_q[rows] = d_scores @ k
        d_k += d_scores.mT @ q_BHQC[rows]
    return d_q, _sum_of_query_heads(d_k, k_BGKC), _sum_of_query_heads(d_v, v_BGKC)


def _scores(q_BHQC: Tensor, k_BHKC: Tensor, start: int, causal: bool) -> Tensor:
    """Scaled scores [B, H, Q, K] in at least fp32. `start` is the index of the first query in the block."""
    scores = at_least_fp32(q_BHQC @ k_BHKC.mT) / math.sqrt(k_BHKC.shape[-1])
    if causal:
        Q, K = scores.shape[-2:]
        later = torch.ones(Q, K, dtype=torch.bool, device=scores.device).triu(start + 1)
        scores.masked_fill_(later, -math.inf)
    return scores


def _cuda_kernel(q: Tensor) -> bool:
    """Whether torch's CUDA flash attention can process this tensor without padding it."""
    return q.device.type == "cuda" and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def for_each_query_head(x_BGKC: Tensor, q_BHQC: Tensor) -> Tensor:
    times = q_BHQC.shape[1] // x_BGKC.shape[1]
    return x_BGKC if times == 1 else x_BGKC.repeat_interleave(times, 1)


def _sum_of_query_heads(grad_BHKC: Tensor, x_BGKC: Tensor) -> Tensor:
    B, G, K, C = x_BGKC.shape
    return grad_BHKC.view(B, G, -1, K, C).sum(2)
