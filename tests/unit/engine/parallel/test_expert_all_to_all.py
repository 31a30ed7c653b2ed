"""Compares dispatch and combine with a plain loop over tokens and their experts."""

import pytest
import torch
from torch import Tensor

from engine.parallel.expert_all_to_all import Placement, plan_dispatch, reordered

T, D, E = 12, 5, 4


@pytest.fixture(autouse=True)
def fp64() -> object:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("logical", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=["in place", "placed"])
@pytest.mark.parametrize("drops", [False, True], ids=["dropless", "drops"])
@pytest.mark.parametrize("K", [1, 2, 4], ids=["one expert", "few experts", "any number of experts"])
def test_each_token_gets_its_experts_sum(drops: bool, logical: list[int], K: int) -> None:
    coin = torch.Generator().manual_seed(1)
    x_TD = torch.randn(T, D, generator=coin, requires_grad=True)
    matrices = torch.randn(E, D, D, generator=coin, requires_grad=True)
    weights_TK = torch.rand(T, K, generator=coin, requires_grad=True)
    top_TK = torch.rand(T, E, generator=coin).topk(K).indices
    keep_TK = torch.rand(T, K, generator=coin) < 0.6 if drops else None

    def stack(rows: Tensor, offsets: Tensor) -> Tensor:
        """Rows after the last offset remain undefined, as in a grouped GEMM."""
        *parts, behind = rows.tensor_split(offsets.long())
        products = [part @ matrices[e] for part, e in zip(parts, logical, strict=True)]
        return torch.cat([*products, torch.full_like(behind, torch.nan)])

    dispatch = plan_dispatch(top_TK, keep_TK, Placement([], logical))
    ours = dispatch.combine(dispatch.run(dispatch.send(x_TD), stack), weights_TK)
    grad_out = torch.randn(T, D, generator=coin)
    leaves = (x_TD, matrices, weights_TK)
    grads = torch.autograd.grad(ours, leaves, grad_out)

    kept = torch.ones(T, K, dtype=torch.bool) if keep_TK is None else keep_TK
    rows = [
        sum(
            (x_TD[t] @ matrices[top_TK[t, k]] * weights_TK[t, k] * kept[t, k] for k in range(K)),
            torch.zeros(D),
        )
        for t in range(T)
    ]
    textbook = torch.stack(rows)
    torch.testing.assert_close(ours, textbook, rtol=1e-12, atol=1e-12)
    for ours_, theirs in zip(grads, torch.autograd.grad(textbook, leaves, grad_out), strict=True):
        torch.testing.assert_close(ours_, theirs, rtol=1e-12, atol=1e-12)


def test_reordered_rows_have_the_gradient_of_a_gather() -> None:
    rows = torch.randn(7, 3, requires_grad=True)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(lambda x: reordered(x, order, order.argsort()), rows)
    assert torch.equal(reordered(rows, order, order.argsort()), rows[order])


def test_sums_are_in_fp32() -> None:
    """Outputs and gradients are bf16 but are summed in fp32, because a sum in bf16 would round 256 + 1 to 256."""
    torch.set_default_dtype(torch.float32)
    dispatch = plan_dispatch(torch.tensor([[0, 1, 2]]), None, Placement([], range(E)))
    outputs = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert dispatch.combine(outputs, torch.ones(1, 3)).item() == 258.0
    x = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(dispatch.send(x).rows, x, outputs)
    assert grad.item() == 258.0
