"""Compares routers, token drops, load balancing and shared experts with plain loops over tokens, as in the papers."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from agents.protocol import Value
from agents.rank.agent import Agent
from engine.config.knob_values import KnobValues
from engine.config.sections.model import Moe
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.moe.balancing_losses import updated_bias
from engine.model.moe.moe_layer import MoeLayer, Routing
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import BIAS, SMALL
from tests.unit.engine.config.test_layout import DEMO

B, S, D, E = 3, 24, 64, 8


def layer_of(knob_values: KnobValues | None = None, **moe: Any) -> tuple[MoeLayer, Meter]:
    """A layer whose router gives the experts clearly different scores."""
    meter = Meter(1, E)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    mixture = Moe(**{"experts": E, "top_k": 2, "d_expert": 32, "balance": "none"} | moe)
    layer = MoeLayer(weights, 0, mixture, D, 0.02, knob_values or KnobValues(), meter)
    with torch.no_grad():
        layer.router.weight *= 10.0
    return layer, meter


@pytest.fixture
def x() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1))


def run(layer: MoeLayer, x: Tensor) -> tuple[Tensor, Routing]:
    memo: dict[str, Routing] = {}
    return layer(x, memo), memo["routing"]


def expert(layer: MoeLayer, e: int, token: Tensor) -> Tensor:
    experts = layer.experts
    return (F.silu(token @ experts.gate[e]) * (token @ experts.up[e])) @ experts.down[e]


def plain_scores(layer: MoeLayer, token: Tensor) -> list[float]:
    logits = (layer.router.weight @ token).tolist()
    if layer.router.moe.score == "sigmoid":
        return [1.0 / (1.0 + math.exp(-z)) for z in logits]
    total = sum(math.exp(z) for z in logits)
    return [math.exp(z) / total for z in logits]


def plain_top(layer: MoeLayer, scores: list[float]) -> list[int]:
    """The experts of a token, as in DeepSeek-V3, section 2.1.2: first groups and then experts within them, by biased
    score."""
    moe = layer.router.moe
    bias = [0.0] * E if layer.router.bias is None else layer.router.bias.tolist()
    wanted = [score + b for score, b in zip(scores, bias, strict=True)]
    size, top_groups = E // moe.groups, moe.top_groups or moe.groups
    counted = -(-moe.top_k // top_groups)
    good = {g: sum(sorted(wanted[g * size : (g + 1) * size])[-counted:]) for g in range(moe.groups)}
    best = sorted(good, key=lambda g: -good[g])[:top_groups]
    within = [e for e in range(E) if e // size in best]
    return sorted(within, key=lambda e: -wanted[e])[: moe.top_k]


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"top_k": 1},
        {"score": "sigmoid", "top_k": 3},
        {"score": "sigmoid", "top_k": 1},
        {"groups": 4, "top_groups": 2, "top_k": 3},
        {"groups": 4, "top_groups": 1},
        {"groups": 2, "top_groups": 1, "top_k": 4},
        {"balance": "bias", "top_k": 3},
        {"balance": "bias", "score": "sigmoid", "groups": 4, "top_groups": 3, "top_k": 4},
        {
            "balance": "aux+bias",
            "score": "sigmoid",
            "groups": 4,
            "top_groups": 3,
            "top_k": 4,
            "route_scale": 2.5,
        },
        {"top_k": 1, "route_scale": 0.5},
    ],
    ids=str,
)
def test_token_choice_equals_a_loop_over_tokens(x: Tensor, moe: dict[str, Any]) -> None:
    layer, _ = layer_of(**moe)
    if layer.router.bias is not None:
        # This bias is larger than the differences between scores.
        layer.router.bias += torch.linspace(0.3, -0.3, E)
    out, _ = run(layer, x)
    unlike, scale = 0, layer.router.moe.route_scale
    for b in range(B):
        for s in range(S):
            scores = plain_scores(layer, x[b, s])
            top = plain_top(layer, scores)
            unlike += set(top) != set(sorted(range(E), key=lambda e: -scores[e])[: layer.router.moe.top_k])
            total = sum(scores[e] for e in top) if len(top) > 1 else 1.0
            expected = sum(scores[e] / total * expert(layer, e, x[b, s]) for e in top) * scale
            torch.testing.assert_close(out[b, s], expected, atol=1e-6, rtol=1e-4)
    assert (unlike > 0) == (layer.router.bias is not None or layer.router.moe.top_groups is not None)


@pytest.mark.parametrize("factor", [None, 0.5, 1.7, 8.0])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_expert_choice_equals_a_loop_over_experts(x: Tensor, factor: float | None, score: str) -> None:
    """Zhou et al. 2022: each expert takes the C tokens of a sequence with the highest scores; the weights are the
    unnormalised scores."""
    layer, meter = layer_of(KnobValues(capacity_factor=factor), router="expert_choice", score=score)
    out, _ = run(layer, x)
    capacity = min(S, math.ceil((factor or 1.0) * S * 2 / E))
    for b in range(B):
        scores = [plain_scores(layer, x[b, s]) for s in range(S)]
        expected = torch.zeros(S, D)
        for e in range(E):
            claims = torch.tensor([scores[s][e] for s in range(S)]).half().tolist()
            for s in sorted(range(S), key=lambda s: (-claims[s], s))[:capacity]:
                expected[s] += scores[s][e] * expert(layer, e, x[b, s]).detach()
        torch.testing.assert_close(out[b], expected, atol=1e-6, rtol=1e-4)
    assert meter.readings.load.tolist() == [[B * capacity] * E]
    assert int(meter.readings.dropped) == 0


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("drop", ["position", "probability"])
def test_drops_equal_a_count_in_a_loop(x: Tensor, factor: float, drop: str) -> None:
    layer, meter = layer_of(KnobValues(capacity_factor=factor), drop=drop)
    _, routing = run(layer, x)
    capacity = math.ceil(factor * S * 2 / E)
    kept = []
    for b in range(B):
        scores = [plain_scores(layer, x[b, s]) for s in range(S)]
        tops = [plain_top(layer, scores[s]) for s in range(S)]
        for e in range(E):
            queue = [s for s in range(S) if e in tops[s]]
            if drop == "probability":
                sure = torch.tensor(scores).half()
                queue.sort(key=lambda s: (-sure[s, e].item(), s))
            kept += [((b * S + s) * 2 + tops[s].index(e)) for s in queue[:capacity]]
    keep, plan = routing.choice.keep_TK, routing.dispatch
    assert keep.flatten().nonzero().flatten().tolist() == sorted(kept)
    assert sorted(plan.rows_TK[keep].tolist()) == list(range(int(plan.filled))) == list(range(len(kept)))
    assert len(plan.tokens_N) == min(2 * B * S, B * E * capacity)
    assert int(meter.readings.dropped) == B * S * 2 - len(kept) > 0
    assert int(meter.readings.load.sum()) == B * S * 2


def test_ties_go_to_the_lower_index() -> None:
    """Among equal scores, the router prefers the token at the lower position or the expert with the lower index."""
    alike = torch.ones(1, S, D)
    for drop in ("position", "probability"):
        layer, _ = layer_of(KnobValues(capacity_factor=0.5), drop=drop)
        with torch.no_grad():
            layer.router.weight.fill_(0.1)
        _, routing = run(layer, alike)
        assert routing.choice.experts_TK.tolist() == [[0, 1]] * S
        plan = routing.dispatch
        assert plan.tokens_N[: int(plan.filled)].tolist() == [0, 1, 2] * 2, drop
    layer, _ = layer_of(router="expert_choice")
    _, routing = run(layer, alike)
    assert routing.dispatch.tokens_N.tolist() == list(range(6)) * E


def test_rounding_does_not_choose_between_equal_tokens(x: Tensor) -> None:
    layer, _ = layer_of(router="expert_choice")
    scores = torch.full((1, S, E), 0.3)
    scores[0, ::2] += 3e-8  # a rounding error
    assert layer.router.choose(scores).keep_TK.nonzero()[:, 0].unique().tolist() == list(range(6))  # type: ignore[union-attr]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("what", ["aux", "z"])
def test_losses_have_gradients_with_their_own_scale(x: Tensor, score: str, what: str) -> None:
    """Compares the router's gradient with coefficient x scale x d(loss) / d(router), for which autograd differentiates
    a plain implementation of the loss formula."""
    coefs = {"aux": {"aux_loss_coef": 0.5}, "z": {"z_loss_coef": 0.5}}[what]
    layer, _ = layer_of(
        KnobValues(aux_scale=0.25, **coefs), balance="aux" if what == "aux" else "none", score=score
    )
    out, routing = run(layer, x)
    (out * 0.0).sum().backward()
    router = layer.router.weight.detach().clone().requires_grad_()
    loss = torch.zeros(())
    for b in range(B):
        chosen = F.one_hot(routing.choice.experts_TK.view(B, S, 2)[b], E).sum((0, 1)) / (2 * S)
        mean = torch.zeros(E)
        for s in range(S):
            logits = router @ x[b, s]
            each = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum()
            mean = mean + each / S
            if what == "z":
                loss = loss + logits.exp().sum().log() ** 2 / S
        if what == "aux":
            loss = loss + E * (chosen * mean).sum()
    (0.5 * 0.25 * loss).backward()
    torch.testing.assert_close(layer.router.weight.grad, router.grad)


def test_with_a_bias_the_loss_counts_the_highest_scores(x: Tensor) -> None:
    """DeepSeek-V3, eq. 17-20: for each token, the balancing loss counts the K experts with the highest unbiased scores,
    whatever their group."""
    layer, _ = layer_of(
        KnobValues(aux_scale=0.25, aux_loss_coef=0.5),
        balance="aux+bias",
        score="sigmoid",
        groups=4,
        top_groups=1,
        top_k=2,
    )
    assert layer.router.bias is not None
    layer.router.bias += torch.linspace(0.3, -0.3, E)
    out, routing = run(layer, x.requires_grad_())
    (out * 0.0).sum().backward()
    router, tokens = (
        layer.router.weight.detach().clone().requires_grad_(),
        x.detach().clone().requires_grad_(),
    )
    loss, unlike = torch.zeros(()), 0
    for b in range(B):
        count, mean = torch.zeros(E), torch.zeros(E)
        for s in range(S):
            scores = (router @ tokens[b, s]).sigmoid()
            mean = mean + scores / scores.sum() / S
            top = scores.detach().topk(2).indices
            count[top] += E / (2 * S)
            unlike += set(top.tolist()) != set(routing.choice.experts_TK.view(B, S, 2)[b, s].tolist())
        loss = loss + (count * mean).sum()
    (0.5 * 0.25 * loss).backward()
    assert unlike > S, "the choice should differ from the loss's counts"
    torch.testing.assert_close(layer.router.weight.grad, router.grad)
    assert x.grad is not None and x.grad.norm() > 0, "the loss has a gradient to the router's input too"
    torch.testing.assert_close(x.grad, tokens.grad)


@pytest.mark.parametrize(
    "moe",
    [
        {"top_k": 1, "score": "sigmoid"},
        {"balance": "bias"},
        {"router": "expert_choice", "top_k": 1},
        {"groups": 4, "top_groups": 1},
    ],
    ids=str,
)
def test_the_loss_reaches_the_router(x: Tensor, moe: dict[str, Any]) -> None:
    layer, _ = layer_of(**moe)
    layer(x, {}).square().sum().backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.norm() > 1e-7


def test_a_bias_moves_towards_balance_by_its_rate() -> None:
    bias = updated_bias(torch.zeros(4), torch.tensor([5, 3, 4, 4]), 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0, 0.0]


def test_shared_experts_are_one_swiglu_of_every_token(x: Tensor) -> None:
    (alone_layer, _), (layer, _) = layer_of(), layer_of(shared_experts=3)
    out, shared = run(layer, x)[0], layer.shared
    assert shared is not None and shared.gate.shape == (3 * 32, D)
    for b in range(B):
        for s in range(S):
            beside = sum(  # each expert has its own part of the width
                shared.down[:, n : n + 32]
                @ (F.silu(shared.gate[n : n + 32] @ x[b, s]) * (shared.up[n : n + 32] @ x[b, s]))
                for n in range(0, 96, 32)
            )
            torch.testing.assert_close(out[b, s] - alone_layer(x, {})[b, s], beside, atol=1e-6, rtol=1e-3)


# --------------------------------------------------------------------------------------------------- with a trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    layout = load(DEMO, [*SMALL, *BIAS, "knobs.recompute=full", "train.steps=3"])
    meter = Meter(2, E)
    yield Trainer(layout, meter, Agent(None, lambda: meter.operation))
    dist.destroy_process_group()


def biases(trainer: Trainer) -> dict[str, Tensor]:
    return {n: b.clone() for n, b in trainer.stages[0].state_dict().items() if n.endswith("router.bias")}


def test_biases_are_state_and_follow_the_load_once_a_step(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = biases(trainer)
    assert list(before) == ["layers.0.mlp.router.bias", "layers.1.mlp.router.bias"]
    trainer.train_step(0)
    load = trainer.meter.readings.load
    assert load.sum(1).tolist() == [8 * 32 * 2] * 2, "recomputation was counted too"
    for layer, (name, bias) in enumerate(biases(trainer).items()):
        mean = load[layer].double().mean()
        expected = 0.02 * torch.sign(mean - load[layer]).float()
        assert torch.equal(bias, expected) and not torch.equal(bias, before[name])
    monkeypatch.setattr(type(trainer.computation.norm), "__call__", lambda _: torch.tensor(float("nan")))
    before = biases(trainer)
    trainer.train_step(1)
    assert all(torch.equal(bias, before[name]) for name, bias in biases(trainer).items())


@pytest.mark.parametrize(
    ("knob", "value", "why"),
    [
        ("bias_rate", 1.5, "0 to 1"),
        ("aux_loss_coef", 0.1, "there is no knob"),
        ("z_loss_coef", None, "0 to 100"),
    ],
)
def test_a_layout_has_only_the_knobs_of_its_router(
    trainer: Trainer, knob: str, value: Value, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        trainer.board.prepare({knob: value})
    assert not any(state.loss_neutral for state in trainer.board.states() if state.name.endswith("_coef"))
