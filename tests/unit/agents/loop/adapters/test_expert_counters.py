"""Expert counts of DeepSpeed's MoE layers, without DeepSpeed."""

import pytest

torch = pytest.importorskip("torch")

from agents.loop.adapters.expert_load import ExpertLoad  # noqa: E402
from agents.loop.adapters.torch_ranks import TorchRanks  # noqa: E402


def test_deepspeed_layers_are_counted_once_in_training() -> None:
    class MOELayer(torch.nn.Module):  # type: ignore[name-defined,misc]
        ep_size, num_local_experts = 2, 2

        def forward(self, x: object) -> object:
            self.exp_counts = torch.tensor([3, 0, 4, 1])  # of this forward
            return x

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Identity(), MOELayer()])
    load = ExpertLoad(model, TorchRanks())
    for _ in range(2):  # two micro-batches
        model.layers[1](None)
    assert load.total(1) == {1: [6, 0, 8, 2]}
    model.eval()
    model.layers[1](None)
    assert load.total(2) == {1: [0, 0, 0, 0]}
