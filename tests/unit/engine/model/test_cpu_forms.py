"""Operations that the engine implements itself on a CPU, because PyTorch's are slower: values and gradients equal
PyTorch's."""

import pytest
import torch
from torch import Tensor

from engine.kernels.softmax import SHORT, softmax
from engine.model.attention import NARROW, rope_table, rotate


def gradient(out: Tensor, x: Tensor) -> Tensor:
    weights = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view_as(out)
    (found,) = torch.autograd.grad(out, x, weights)
    return found


@pytest.mark.parametrize("width", [2, SHORT - 1, SHORT])
def test_softmax(width: int) -> None:
    x = (40.0 * torch.randn(3, 5, width, dtype=torch.float64)).requires_grad_()
    torch.testing.assert_close(softmax(x), x.softmax(-1), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(gradient(softmax(x), x), gradient(x.softmax(-1), x), rtol=1e-11, atol=1e-15)


def plain(x: Tensor, table: Tensor) -> Tensor:
    """The plain rotary embedding: it rotates pairs of elements, one from each half of a head."""
    cos, sin = table[0, ..., : x.shape[-1] // 2], table[1, ..., x.shape[-1] // 2 :]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("width", [8, NARROW])
@pytest.mark.parametrize("by_sequence", [False, True])  # True: positions start again in each document
def test_rotation(width: int, by_sequence: bool) -> None:
    x = torch.randn(2, 6, 3, width, dtype=torch.float64).requires_grad_()
    table = rope_table(9, width, 100.0).double()
    table = table[:, torch.randint(0, 9, (2, 6))] if by_sequence else table[:, 2:8]
    torch.testing.assert_close(rotate(x, table), plain(x, table), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(
        gradient(rotate(x, table), x), gradient(plain(x, table), x), rtol=1e-13, atol=1e-15
    )
