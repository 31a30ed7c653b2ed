"""Compares the model's logits with a plain implementation of its formulas, and the (token, expert) pairs that it keeps
with those that a plain loop keeps."""

import math
from collections import Counter

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.moe.moe_layer import MoeLayer
from engine.model.rms_norm import RMSNorm
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.initial_values import initial_values
from engine.parallel.parameters import ParameterFactory
from tests.ranks.memory.live_storages import LiveStorages
from tests.unit.engine.config.test_layout import DEMO

SMALL = [
    "grid.pp=1",
    "grid.dp_shard=1",
    "grid.tp=1",
    "grid.ep=1",
    "model.layers=2",
    "model.seq_len=24",
    "model.moe.every=2",
]


def build(layout: Layout, knob_values: KnobValues) -> tuple[Stage, Meter]:
    meter = Meter(layout.model.layers, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    return Stage(weights, layout.model, range(layout.model.layers), knob_values, meter), meter


@pytest.fixture
def layout() -> Layout:
    return load(DEMO, SMALL)


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 256, (3, 24), generator=torch.Generator().manual_seed(5))


def plain(stage: Stage, layout: Layout, tokens: Tensor) -> Tensor:
    """The logits, computed one token and one expert at a time."""
    model = layout.model
    p = dict(stage.named_parameters())
    x = p["embedding.weight"][tokens]
    S, C = tokens.shape[1], model.head_width
    turn = torch.arange(S)[:, None] * model.rope_theta ** (-torch.arange(0, C, 2) / C)
    for layer in range(model.layers):
        at = f"layers.{layer}."
        h = norm(x, p[at + "attention_norm.weight"], model.norm_eps)
        heads = []
        for head in range(model.heads):
            group = head // (model.heads // model.kv)
            q, k, v = (
                h @ p[f"{at}attention.{name}"][index * C : (index + 1) * C].T
                for name, index in (("q", head), ("k", group), ("v", group))
            )
            q, k = spin(q, turn), spin(k, turn)
            scores = (q @ k.transpose(1, 2) / math.sqrt(C)).masked_fill(
                torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf
            )
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ p[at + "attention.o"].T
        h = norm(x, p[at + "mlp_norm.weight"], model.norm_eps)
        if model.has_experts(layer):
            x = x + plain_moe(
                h, {name.removeprefix(at + "mlp."): w for name, w in p.items()}, model.moe.top_k
            )
        else:
            hidden = F.silu(h @ p[at + "mlp.gate"].T) * (h @ p[at + "mlp.up"].T)
            x = x + hidden @ p[at + "mlp.down"].T
    return norm(x, p["norm.weight"], model.norm_eps) @ p["head.weight"].T


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def spin(x: Tensor, turn: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((z.real, z.imag), -1)


def plain_moe(h: Tensor, w: dict[str, Tensor], top_k: int) -> Tensor:
    out = torch.zeros_like(h)
    for b in range(h.shape[0]):
        for t in range(h.shape[1]):
            probs = (w["router.weight"] @ h[b, t]).softmax(-1)
            best = probs.topk(top_k)
            total = best.values.sum() if top_k > 1 else 1.0
            for prob, e in zip(best.values / total, best.indices.tolist(), strict=True):
                hidden = F.silu(h[b, t] @ w["experts.gate"][e]) * (h[b, t] @ w["experts.up"][e])
                out[b, t] += prob * (hidden @ w["experts.down"][e])
    return out


def test_equals_a_plain_implementation(layout: Layout, tokens: Tensor) -> None:
    stage, _ = build(layout, KnobValues())
    with torch.no_grad():
        torch.testing.assert_close(stage(tokens), plain(stage, layout, tokens), atol=2e-6, rtol=1e-5)


def test_recompute_changes_nothing_and_counts_once(layout: Layout, tokens: Tensor) -> None:
    results = {}
    for recompute in ("none", "selective", "full"):
        stage, meter = build(layout, KnobValues(recompute, 1.0, 0.01))
        loss = cross_entropy(stage(tokens), tokens.roll(-1, 1), Axis("tp", None, meter))
        loss.backward()
        grads = torch.cat([p.grad.flatten() for p in stage.parameters()])
        results[recompute] = (loss.detach(), grads, meter.readings.load, meter.readings.dropped)
    for recompute in ("selective", "full"):
        for mine, none in zip(results[recompute], results["none"], strict=True):
            assert torch.equal(mine, none), recompute
    assert results["none"][2].sum() == tokens.numel() * 2  # top-2, and one layer has experts


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
def test_drops_equal_a_count_in_a_loop(layout: Layout, factor: float) -> None:
    """An expert keeps the first ceil(factor S K / E) token-expert pairs of each sequence, where S is the sequence
    length, K the experts per token and E the number of experts."""
    meter = Meter(1, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    moe = layout.model.moe
    assert moe is not None
    layer = MoeLayer(weights, 0, moe, 64, 0.02, KnobValues(capacity_factor=factor), meter)
    x = torch.randn(4, 24, 64, generator=torch.Generator().manual_seed(1))
    memo: dict[str, object] = {}
    layer(x, memo)  # type: ignore[arg-type]
    routing = memo["routing"]
    capacity = math.ceil(factor * 24 * moe.top_k / 8)
    kept = []
    for sequence in range(4):
        taken: Counter[int] = Counter()
        for token in range(24):
            number = sequence * 24 + token
            for k, expert in enumerate((layer.router.weight @ x[sequence, token]).topk(2).indices.tolist()):
                if taken[expert] < capacity:
                    taken[expert] += 1
                    kept.append(number * moe.top_k + k)
    pairs = routing.choice.keep_TK.flatten().nonzero().flatten()  # type: ignore[attr-defined]
    assert pairs.tolist() == kept
    assert int(meter.readings.dropped) == 4 * 24 * 2 - len(kept) > 0


def test_the_balancing_loss_reaches_the_router_with_its_own_scale(layout: Layout) -> None:
    """Compares the router's gradient with coef x scale x d(aux) / d(router), for which autograd differentiates a plain
    implementation of the loss formula."""
    meter = Meter(1, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    moe = layout.model.moe
    assert moe is not None
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1))
    layer = MoeLayer(weights, 0, moe, 64, 0.02, KnobValues(aux_loss_coef=0.5, aux_scale=0.25), meter)
    (layer(x, {}) * 0.0).sum().backward()
    router = layer.router.weight.detach().clone().requires_grad_()
    aux = torch.zeros(())
    for sequence in x:
        probs = (sequence @ router.T).softmax(-1)
        chosen = F.one_hot(probs.topk(2).indices, 8).sum((0, 1)) / (24 * 2)
        aux = aux + 8 * (chosen * probs.mean(0)).sum()
    (0.5 * 0.25 * aux).backward()
    torch.testing.assert_close(layer.router.weight.grad, router.grad)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_loss_reaches_the_router(layout: Layout, top_k: int) -> None:
    """A gradient must also exist for top-1, where a normalised weight would be constant and have no gradient."""
    assert layout.model.moe is not None
    moe = msgspec.structs.replace(layout.model.moe, top_k=top_k, balance="none")
    meter = Meter(1, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    layer = MoeLayer(weights, 0, moe, 64, 0.02, KnobValues(), meter)
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1))
    layer(x, {}).square().sum().backward()
    assert layer.router.weight.grad is not None and layer.router.weight.grad.norm() > 1e-7


def test_initial_weights_depend_on_name_and_seed_only() -> None:
    one = initial_values("layers.0.attention.q", (8, 4), 0.02, 1)
    assert torch.equal(one, initial_values("layers.0.attention.q", (8, 4), 0.02, 1))
    assert not torch.equal(one, initial_values("layers.1.attention.q", (8, 4), 0.02, 1))
    assert not torch.equal(one, initial_values("layers.0.attention.q", (8, 4), 0.02, 2))


def test_a_tied_weight_gets_the_gradients_of_both_uses(layout: Layout, tokens: Tensor) -> None:
    def stage(tied: bool) -> Stage:
        meter = Meter(layout.model.layers, 8)
        tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
        model = msgspec.structs.replace(layout.model, tie_embeddings=tied)
        return Stage(ParameterFactory(1, tp, ep), model, range(model.layers), KnobValues.of(layout), meter)

    one, two = stage(True), stage(False)
    assert two.head and two.embedding and one.embedding
    assert len(list(one.parameters())) == len(list(two.parameters())) - 1
    with torch.no_grad():
        two.head.weight.copy_(two.embedding.weight)
    torch.testing.assert_close(one(tokens), two(tokens))
    for stage_ in (one, two):
        stage_(tokens).square().sum().backward()
    both = two.embedding.weight.grad, two.head.weight.grad
    assert both[0] is not None and both[1] is not None
    torch.testing.assert_close(one.embedding.weight.grad, both[0] + both[1])


def test_memory_saved_for_backward_depends_on_tokens_only(tokens: Tensor) -> None:
    """If the forward pass copied weights, each micro-batch would save the copies for backward, however few its
    tokens."""
    layout = load(DEMO, [*SMALL, "model.moe=none"])
    stage, _ = build(layout, KnobValues())
    held = {x.untyped_storage().data_ptr() for x in (*stage.parameters(), *stage.buffers())}

    def kept(sequences: int) -> int:
        storages: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            logits = stage(tokens[:sequences])
        assert logits.requires_grad
        return sum(size for pointer, size in storages.items() if pointer not in held)

    assert kept(2) == 2 * kept(1) > 0


def test_targets_below_zero_are_ignored() -> None:
    meter = Meter()
    logits = torch.randn(2, 5, 16, requires_grad=True)
    targets = torch.tensor([[1, 2, -1, 4, 5], [6, -1, -1, 9, 15]])
    loss = cross_entropy(logits.clone(), targets, Axis("tp", None, meter))
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    torch.testing.assert_close(loss, expected)
    mine, theirs = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0]
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_takes_a_chunk_of_tokens_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing the loss in chunks changes neither the loss nor its gradient. In addition to the logits, at most two
    chunks in fp32 exist at a time."""
    tokens, vocabulary, chunk = 1000, 512, 8192
    start = torch.randn(4, tokens // 4, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    targets = torch.arange(tokens).view(4, -1) % (vocabulary + 1) - 1  # -1: ignored

    def run() -> tuple[Tensor, Tensor]:
        logits = start.clone().requires_grad_()
        loss = cross_entropy(logits, targets, Axis("tp", None, Meter()))
        return loss.detach(), torch.autograd.grad(loss / 7, logits)[0].clone()

    whole = run()
    monkeypatch.setattr("engine.model.loss.LOSS_CHUNK", chunk)
    assert all(torch.equal(a, b) for a, b in zip(run(), whole, strict=True))
    logits = start.clone().requires_grad_()
    with LiveStorages() as live:
        (cross_entropy(logits, targets, Axis("tp", None, Meter())) / 7).backward()
    assert live.peak <= 2 * chunk * 4 + 64 * tokens < start.nbytes / 2


def test_a_second_backward_of_the_loss_is_refused() -> None:
    """The first backward pass has overwritten the logits."""
    logits = torch.randn(2, 5, 16, requires_grad=True)
    loss = cross_entropy(logits * 1.0, torch.zeros(2, 5, dtype=torch.int64), Axis("tp", None, Meter()))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="overwritten"):
        loss.backward()


def test_rms_norm_equals_torch_forward_and_backward() -> None:
    weights = ParameterFactory(0, Axis("tp", None, Meter()), Axis("ep", None, Meter()))
    norm = RMSNorm(weights, 24, 1e-5).double()
    x = torch.randn(3, 5, 24, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
    grad = torch.randn_like(x)
    mine = (norm(x), *torch.autograd.grad(norm(x), (x, norm.weight), grad))
    out = F.rms_norm(x, (24,), norm.weight, 1e-5)
    for a, b in zip(mine, (out, *torch.autograd.grad(out, (x, norm.weight), grad)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)
