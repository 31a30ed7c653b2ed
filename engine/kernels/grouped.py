"""Grouped GEMM: the product of each group's rows with the group's matrix. Of experts, a group is one expert's rows.

`grouped` uses torch's kernel where it supports the dtype. A kernel that is wrong for a group without rows or for rows
after the last group would train experts with wrong gradients, silently: on B200, weight gradients of empty groups that
are not zero have been reported (pytorch issue 172439, open), and torch does not write the rows after the last group
(pytorch issue 154557, by design), which may hold NaN. `fault` therefore compares a device's kernel with one matmul per
group when a run starts.

Shapes: R rows, G groups, X and Y the widths before and after the product.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [R, X], matrices [G, X, Y], offsets [G]) -> [R, Y]. `offsets[g]` is the end of the rows of group g. Rows after
the last offset are not computed; their values are undefined, and so are those of their gradients."""

# Dtypes that torch documents for its grouped GEMM. For other dtypes (fp64, and fp32 on a GPU), `grouped` runs one
# matmul per group.
GROUPED = {"cpu": {torch.float32, torch.bfloat16}}

# Rows of each group in the products that `fault` checks.
CASES = ((37, 0, 64, 0, 9), (0, 16, 0), (0, 0, 0))
TAIL = 5  # rows after the last group
CPU_WIDTH = 512  # widest product that is checked on a CPU, where the kernel does not depend on the width
TOLERANCE = 2.0**-6  # of the largest element; a product in bf16 is rounded by at most 2**-9


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `grouped` uses torch's kernel."""
    return dtype in GROUPED.get(device.type, {torch.bfloat16})


def grouped(rows_RX: Tensor, weights_GXY: Tensor, offsets: Tensor) -> Tensor:
    """The product of each group, in one kernel where torch has one for the dtype."""
    if not has_kernel(rows_RX.device, rows_RX.dtype):
        return one_by_one(rows_RX, weights_GXY, offsets)
    return F.grouped_mm(rows_RX, weights_GXY, offs=offsets)


def one_by_one(rows_RX: Tensor, weights_GXY: Tensor, offsets: Tensor) -> Tensor:
    """The product of each group, in one matmul per group. The host waits for the device, to read the offsets."""
    *parts, behind = rows_RX.tensor_split(offsets.cpu().long())
    products = [part @ weight for part, weight in zip(parts, weights_GXY, strict=True)]
    return torch.cat([*products, behind.new_zeros(len(behind), weights_GXY.shape[-1])])


def fault(product: Product, x: int, y: int, dtype: torch.dtype, device: torch.device) -> str:
    """What is wrong with products of [R, `x`] and [G, `x`, `y`] in `dtype` on `device`, or with their gradients; an
    empty string if they are right. The rows after the last group are NaN, in the rows and in the gradient of the
    product, because training may have any values there."""
    if device.type == "cpu":
        x, y = min(x, CPU_WIDTH), min(y, CPU_WIDTH)
    for counts in CASES:
        for tail in (0, TAIL):
            try:
                for name, group, found, right in _compared(product, counts, tail, x, y, dtype, device):
                    most = float(right.abs().max()) if right.numel() else 0.0
                    off = (found.float() - right).abs()
                    if not bool((off <= TOLERANCE * most).all()):  # also if it is NaN
                        part = f"the {name} of a group of {counts[group]} rows"
                        return f"{part} is off by {float(off.max()):.3g}, and at most {most:.3g} is right"
            except RuntimeError as error:
                text = str(error).partition("\n")[0]
                return f"with groups of {', '.join(map(str, counts))} rows: {text}"
    return ""


def _compared(
    product: Product,
    counts: tuple[int, ...],
    tail: int,
    x: int,
    y: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """For each group: (what, group, the product's value, the value by one matmul in fp32)."""
    random = torch.Generator(device).manual_seed(sum(counts))

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, device=device).to(dtype)

    full = sum(counts)
    rows, weights, grad = values(full + tail, x), values(len(counts), x, y), values(full + tail, y)
    rows[full:], grad[full:] = float("nan"), float("nan")
    offsets = torch.tensor(counts, device=device).cumsum(0).int()
    with torch.enable_grad():
        inputs = rows.requires_grad_(), weights.requires_grad_()
        out = product(*inputs, offsets)
        d_rows, d_weights = torch.autograd.grad(out, inputs, grad)
    first = 0
    for group, count in enumerate(counts):
        own = slice(first, first := first + count)
        part, weight, d_out = rows[own].detach().float(), weights[group].detach().float(), grad[own].float()
        yield "product", group, out[own].detach(), part @ weight
        yield "gradient of the rows", group, d_rows[own], d_out @ weight.T
        yield "weight gradient", group, d_weights[group], part.T @ d_out
