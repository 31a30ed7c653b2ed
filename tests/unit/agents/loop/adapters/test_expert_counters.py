"""Expert counts from the MoE layers of torchtitan and DeepSpeed, tested without these packages."""

import pytest

torch = pytest.importorskip("torch")

import agents  # noqa: E402
from agents.loop.adapters import expert_load  # noqa: E402
from agents.loop.adapters.expert_load import ExpertLoad  # noqa: E402
from agents.loop.adapters.torch_ranks import TorchRanks  # noqa: E402
from agents.loop.adapters.torchtitan import _ExpertCounters  # noqa: E402
from agents.protocol import Summary  # noqa: E402
from tests.unit.agents.loop.test_loop import Sent  # noqa: E402


class Layer(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A stand-in for torchtitan's MoE layer, which adds its expert counts to a buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = torch.nn.Module()
        self.moe.register_buffer("tokens_per_expert_E", torch.zeros(3))

    def count(self, *pairs: int) -> None:
        self.moe.tokens_per_expert_E += torch.tensor(pairs)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_torchtitan_counters_give_the_pairs_of_each_step(resets: bool, recomputed: bool) -> None:
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"1": torch.nn.Identity(), "4": Layer()})
    layer = model.layers["4"]
    if recomputed:  # as with torch's CheckpointWrapper, each forward runs twice
        layer.checkpoint_impl = "NO_REENTRANT"
    counters = _ExpertCounters([model], TorchRanks())
    for step, pairs in enumerate(([5, 0, 1], [2, 2, 2]), 1):
        for _ in range(2 if recomputed else 1):
            layer.count(*pairs)
        counters.read()
        if resets:  # by the hook that updates the bias of each expert
            layer.moe.tokens_per_expert_E.zero_()
        counters.note_start()
        assert counters.total(step) == {4: pairs}


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


@pytest.mark.parametrize("exchanged", [True, False])
def test_loads_of_two_ranks_are_summed(exchanged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class MOELayer(torch.nn.Module):  # type: ignore[name-defined,misc]
        ep_size, num_local_experts = 2, 2

        def forward(self, x: object) -> object:
            self.exp_counts = torch.tensor([3, 0, 4, 1])
            return x

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([MOELayer(), MOELayer()])
    ranks = TorchRanks()
    ranks.world = 2
    monkeypatch.setattr(ranks, "sum", lambda counts: 2 * counts)
    monkeypatch.setattr(expert_load, "EXCHANGED", 16 if exchanged else 15)
    load = ExpertLoad(model, ranks)
    with agents.join("r", world=2, agree=lambda mine: [mine, mine], hub="none") as loop:
        sent = Sent(loop)
        with loop.step(1) as report:
            model.layers[0](None)
            load.report(report)
        (summary,) = sent.of(Summary)
    assert report.experts == {0: [6, 0, 8, 2], 1: [0, 0, 0, 0]}
    assert (report.own_experts is None) is not exchanged
    assert summary.load_max_over_mean == 2.0
