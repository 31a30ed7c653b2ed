"""Sums a vector over the replicas in compressed form. The module has one function for each compression method in
docs/train/compression.md.

Each function is a generator, which yields the collectives that it has started, and continues after the caller has
awaited them, so the caller can keep the collectives of several vectors in flight. On a GPU, the current stream waits
for each collective, and the host for none. A function returns

- `total` [n]: the sum over the replicas of the values that each replica sent, bit-identical on all replicas;
- `sent` [n]: this rank's part of `total`, so that the sum of `sent` over the replicas is `total`, up to rounding.

A rank's vector minus `sent` is the part of the vector that compression left out. The caller adds this part to the next
step's gradient (error feedback; Seide et al. 2014, Karimireddy et al. 2019), so no part of a gradient is ever lost.

Shapes: n elements, P replicas, c elements of a replica's chunk, k elements of a sparse message.
"""

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from engine.config.compression import INT8_BLOCK, Method, chunk, kept
from engine.parallel.collectives import AsyncCollective, Axis

Reduction = Generator[AsyncCollective, None, tuple[Tensor, Tensor]]

# ------------------------------------------------------------------------------- bf16, fp16 and int8


def quantised(x: Tensor, axis: Axis, method: Method) -> Reduction:
    """Each replica sums one chunk of the vector. An all-to-all exchanges the encoded chunks, each owner sums in full
    precision, and an all-gather distributes the encoded sums.

    A sum in bf16 along a ring would round at every hop, and int8 values with different scales cannot be added at all.
    When the owner of a chunk encodes the sum, the sum is rounded once more. The owner adds the error of this second
    rounding to its own `sent`.
    """
    P, n = axis.size, x.numel()
    c = chunk(method, n, P)
    padded = x.new_zeros(P * c)
    padded[:n] = x
    encode, decode = _CODECS[method]
    rows = encode(padded.view(P, c))
    del padded
    started, received = axis.start_row_exchange(rows)
    yield started
    sums = decode(received, c, x.dtype).sum(0)
    del started, received
    own = encode(sums.unsqueeze(0))
    gathered = own.new_empty(P * own.shape[1])
    yield axis.start_all_gather(gathered, own.flatten())
    total = decode(gathered.view(P, -1), c, x.dtype)
    sent = decode(rows, c, x.dtype)
    sent[axis.rank] += total[axis.rank] - sums
    return total.flatten()[:n], sent.flatten()[:n]


def _to_half(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Encode as `dtype`. A finite value beyond the range of `dtype` is clamped to the largest finite value; the
    difference remains in the residual. Infinity and NaN are kept, so that an overflow is not hidden."""
    most = torch.finfo(dtype).max

    def encode(x_Pc: Tensor) -> Tensor:
        return torch.where(x_Pc.isinf(), x_Pc, x_Pc.clamp(-most, most)).to(dtype).view(torch.uint8)

    return encode


def _from_half(dtype: torch.dtype) -> Callable[[Tensor, int, torch.dtype], Tensor]:
    return lambda raw, c, to: raw.view(dtype)[:, :c].to(to)


def _to_int8(x_Pc: Tensor) -> Tensor:
    """Encode each row as blocks of `INT8_BLOCK` integers from -127 to 127, followed by the scales of the blocks in
    fp32.

    If a block contains infinity or NaN, its scale is NaN, so the block's sum is NaN on all replicas.
    """
    blocks = x_Pc.view(len(x_Pc), -1, INT8_BLOCK)
    scales = (blocks.abs().amax(-1) / 127).float()
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    divisor = torch.where(scales > 0, scales, 1.0).to(x_Pc.dtype).unsqueeze(-1)
    numbers = (blocks / divisor).round().clamp(-127, 127).nan_to_num(0.0).to(torch.int8)
    return torch.cat((numbers.flatten(1).view(torch.uint8), scales.view(torch.uint8)), 1)


def _from_int8(raw: Tensor, c: int, to: torch.dtype) -> Tensor:
    numbers = raw[:, :c].contiguous().view(torch.int8).view(len(raw), -1, INT8_BLOCK).to(to)
    scales = raw[:, c:].contiguous().view(torch.float32).to(to)
    return (numbers * scales.unsqueeze(-1)).flatten(1)


_CODECS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, int, torch.dtype], Tensor]]] = {
    "bf16": (_to_half(torch.bfloat16), _from_half(torch.bfloat16)),
    "fp16": (_to_half(torch.float16), _from_half(torch.float16)),
    "int8": (_to_int8, _from_int8),
}

# ------------------------------------------------------------------- top-k, random-k and threshold


def top_k(x: Tensor, axis: Axis, ratio: float) -> Reduction:
    """Each replica sends its k largest elements by magnitude, with their positions (Aji and Heafield 2017). NaN counts
    as the largest magnitude, so it is always sent."""
    index = x.abs().topk(kept(ratio, x.numel()), sorted=False).indices
    message = _packed(x[index], index)
    rows = message.new_empty(axis.size * message.numel())
    yield axis.start_all_gather(rows, message)
    return _summed(x, rows.view(axis.size, -1), [len(index)] * axis.size), _scattered(x, index)


def threshold(x: Tensor, axis: Axis, times_rms: float) -> Reduction:
    """Each replica sends the elements of its vector whose magnitude exceeds `times_rms` times the vector's root mean
    square. The replicas first exchange their element counts, and the host waits for them; messages are padded to the
    longest one."""
    bound = times_rms * x.square().mean().sqrt()
    bound = torch.where(bound.isfinite(), bound, torch.nan)
    index = (~(x.abs() <= bound)).nonzero().flatten()  # send all elements if one of them is not finite
    counts = torch.empty(axis.size, dtype=torch.int64, device=x.device)
    yield axis.start_all_gather(counts, torch.tensor([len(index)], device=x.device))
    each: list[int] = counts.tolist()
    longest = max(each)
    if not longest:
        return torch.zeros_like(x), torch.zeros_like(x)
    positions = index.new_zeros(longest)
    positions[: len(index)] = index
    message = _packed(x[positions], positions)
    rows = message.new_empty(axis.size * message.numel())
    yield axis.start_all_gather(rows, message)
    return _summed(x, rows.view(axis.size, -1), each), _scattered(x, index)


def random_k(x: Tensor, axis: Axis, ratio: float, seed: int) -> Reduction:
    """Sums only k random elements over the replicas. All replicas draw the same positions from `seed`, so the positions
    are not sent."""
    generator = torch.Generator(x.device).manual_seed(seed)
    k = kept(ratio, x.numel())
    index = torch.randperm(x.numel(), generator=generator, device=x.device)[
        :k
    ].clone()  # frees the other positions
    sent = _scattered(x, index)
    # An infinite element that is not drawn must not be hidden: the step must be skipped.
    sums = torch.where(x.isfinite().all(), x[index], torch.nan)
    yield axis.start_all_reduce(sums)
    total = torch.zeros_like(x)
    total[index] = sums
    return total, sent


def _packed(values: Tensor, index: Tensor) -> Tensor:
    return torch.cat((values.view(torch.uint8), index.int().view(torch.uint8)))


def _summed(like: Tensor, rows: Tensor, counts: list[int]) -> Tensor:
    """The sum of the replicas' elements, added in replica order, so that it is the same on all replicas."""
    total = torch.zeros_like(like)
    k = rows.shape[1] // (like.element_size() + 4)
    for row, count in zip(rows, counts, strict=True):
        values, index = row[: k * like.element_size()], row[k * like.element_size() :]
        # Copied, because a view with another dtype must be aligned.
        total.index_add_(
            0, index.clone().view(torch.int32)[:count].long(), values.clone().view(like.dtype)[:count]
        )
    return total


def _scattered(x: Tensor, index: Tensor) -> Tensor:
    sent = torch.zeros_like(x)
    sent[index] = x[index]
    return sent


# ----------------------------------------------------------------------------------------- PowerSGD


def power_sgd(matrices: list[Tensor], starts: list[Tensor], axis: Axis, after: list[Tensor]) -> Reduction:
    """Computes a low-rank approximation of the sum of the replicas' matrices by one power iteration that starts from
    the last step's factor (Vogels et al. 2019).

    `matrices`: tensors of shape [b, m, n]. `starts`: their initial factors, of shape [b, n, r], equal on all replicas.
    The initial factors of the next step are appended to the list `after`. The columns of P are an orthonormal basis of
    the column space of sum(M Q), and the result is the projection P P^T sum(M). Each replica sends its M Q and its M^T
    P, and both are summed over the replicas.
    """
    bases = [matrix @ start for matrix, start in zip(matrices, starts, strict=True)]
    flat = _flattened(bases)
    yield axis.start_all_reduce(flat)
    bases = [_basis(part) for part in _like(flat, bases)]
    own = [matrix.mT @ basis for matrix, basis in zip(matrices, bases, strict=True)]
    flat = _flattened(own)
    yield axis.start_all_reduce(flat)
    sums = _like(flat, own)
    after += sums
    total = _flattened([basis @ factor.mT for basis, factor in zip(bases, sums, strict=True)])
    sent = _flattened([basis @ factor.mT for basis, factor in zip(bases, own, strict=True)])
    return total, sent


def _basis(x: Tensor) -> Tensor:
    """An orthonormal basis of the column space of each matrix in `x`; all NaN if any element of `x` is not finite."""
    finite = x.isfinite().all()
    basis = torch.linalg.qr(torch.where(finite, x, 0.0))[0]
    return torch.where(finite, basis, torch.nan)


def _flattened(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _like(flat: Tensor, parts: list[Tensor]) -> list[Tensor]:
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
