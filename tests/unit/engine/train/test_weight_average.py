"""The moving average of the weights equals PyTorch's, and leaves the weights themselves unchanged."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine.train.optimization.weight_average import WeightAverage


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_equals_torch(optimizer: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.update_parameters(model)  # its first update is a copy, so both begin with the initial weights
    updates = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    ours = WeightAverage([model], updates, 0.8)
    for _ in range(5):
        model(torch.randn(6, 4)).square().sum().backward()
        updates.step()
        updates.zero_grad()
        ours.update()
        theirs.update_parameters(model)
    weights = [p.detach().clone() for p in model.parameters()]
    with ours.in_use():
        for mine, other in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, other)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
