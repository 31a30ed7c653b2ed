"""A reference for compressed sums, written from docs/train/compression.md without the engine's code; all replicas are
in one process.

`xs` are the replicas' vectors, residuals included. Each function that sums these vectors returns the sum and, for each
replica, the part of the sum that came from its vector. The rest of the vector is the replica's next residual.
"""

import numpy as np
import torch
from torch import Tensor

from engine.config.compression import CompressionValues

Result = tuple[Tensor, list[Tensor]]


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    most = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-most, most)).to(dtype).to(x.dtype)


def int8(x: Tensor) -> Tensor:
    """Rounds each block of 256 numbers to multiples of 1/127 of its largest magnitude."""
    out = []
    for block in x.split(256):
        unit = float((block.abs().max() / 127).float())
        out.append((block / unit).round() * unit if unit else block * 0)
    return torch.cat(out)


def chunked(xs: list[Tensor], method: str) -> Result:
    P, n = len(xs), len(xs[0])
    each = -(-n // P)
    if method == "int8":
        each = -(-each // 256) * 256
    rounded = {
        "int8": int8,
        "bf16": lambda x: cast(x, torch.bfloat16),
        "fp16": lambda x: cast(x, torch.float16),
    }[method]
    total, sent = torch.zeros_like(xs[0]), [torch.zeros_like(x) for x in xs]
    for owner in range(P):
        part = slice(owner * each, min(n, (owner + 1) * each))
        if part.start >= n:
            break
        for x, s in zip(xs, sent, strict=True):
            s[part] = rounded(x[part])
        exact = sum(s[part] for s in sent)
        assert isinstance(exact, Tensor)
        total[part] = rounded(exact)
        sent[owner][part] += total[part] - exact
    return total, sent


def sparse(xs: list[Tensor], masks: list[Tensor]) -> Result:
    sent = [x * mask for x, mask in zip(xs, masks, strict=True)]
    return torch.stack(sent).sum(0), sent


def low_rank(
    xs: list[Tensor], shape: tuple[int, ...], starts: list[np.ndarray]
) -> tuple[Result, list[np.ndarray]]:
    """Sums the replicas' matrices with PowerSGD. If `shape` has three dimensions, each replica has a stack of matrices,
    which are compressed one by one. Also returns the Q factors with which the power iteration of the next step starts.
    """
    b, m, n = (1, *shape) if len(shape) == 2 else shape
    stacks = [x.view(b, m, n).numpy() for x in xs]
    total, sent, after = np.zeros((b, m, n)), [np.zeros((b, m, n)) for _ in xs], []
    for k in range(b):
        P = np.linalg.qr(sum(stack[k] @ starts[k] for stack in stacks))[0]
        for stack, s in zip(stacks, sent, strict=True):
            s[k] = P @ (P.T @ stack[k])
        total[k] = sum(s[k] for s in sent)
        after.append(sum(stack[k].T @ P for stack in stacks))
    return (torch.tensor(total).flatten(), [torch.tensor(s).flatten() for s in sent]), after


def summed(xs: list[Tensor], values: CompressionValues, drawn: Tensor) -> Result:
    """Sums the replicas' vectors with any compression method except power_sgd. `drawn`: the indices of elements, in the
    order in which random_k draws them."""
    if values.method in ("bf16", "fp16", "int8"):
        return chunked(xs, values.method)
    k = max(1, round(values.ratio * len(xs[0])))
    masks = []
    for x in xs:
        mask = torch.zeros_like(x)
        if values.method == "top_k":
            mask[x.abs().argsort(descending=True)[:k]] = 1
        elif values.method == "random_k":
            mask[drawn[:k]] = 1
        else:
            mask[x.abs() > values.threshold * x.square().mean().sqrt()] = 1
        masks.append(mask)
    return sparse(xs, masks)
