"""Attention within documents: for every form of attention, the results for packed sequences equal those of running
each document by itself."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.sections.model import Model, Moe
from engine.data.mixture import starts_of
from engine.kernels import document_attention
from engine.kernels.document_attention import Positions, visible_blocks
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.context.context_parallel import ContextParallel
from engine.parallel.parameters import ParameterFactory
from engine.train.batches.corpus import Corpus
from tests.unit.engine.parallel.test_context_parallel import cut, inputs
from tests.unit.engine.parallel.thread_axis import ThreadAxis, on_each

ENDS = [[0, 1, 9, 10, 31, 48], [0, 20, 48]]  # boundaries of the documents in two sequences of 48 tokens
W = 48
STARTS = torch.tensor([[a for a, b in pairwise(ends) for _ in range(a, b)] for ends in ENDS])

MODELS = {
    "gqa": Model(layers=2, d_model=32, heads=4, kv_heads=2, seq_len=W, qk_norm=True),
    "window": Model(layers=2, d_model=32, heads=4, seq_len=W, window=6),
    "mla": Model(
        layers=2, d_model=32, heads=4, seq_len=W, attention="mla", q_rank=24, kv_rank=20, nope_dim=16,
        rope_dim=8, v_dim=12,
    ),
    "moe": Model(
        layers=2, d_model=32, heads=4, seq_len=W, moe=Moe(experts=4, top_k=2, d_expert=16, balance="none")
    ),
}  # fmt: skip


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_packed_sequence_equals_its_documents_one_by_one(name: str, reset: bool) -> None:
    model = MODELS[name]
    torch.set_default_dtype(torch.float64)
    try:
        meter = Meter(model.layers, model.moe.experts if model.moe else 0)
        axes = tp, _ = Axis("tp", None, meter), Axis("ep", None, meter)
        context = ContextParallel(Axis("cp", None, meter), tp, "ring", reset)
        knobs = KnobValues.of(Layout(model=model))
        packed = Stage(ParameterFactory(3, *axes, context=context), model, range(2), knobs, meter)
        tokens, targets = torch.randint(0, 256, (2, 2, W), generator=torch.Generator().manual_seed(2))
        loss = cross_entropy(packed(tokens, STARTS), targets, tp)
        loss.backward()
        apart = total = 0.0
        grads = {n: torch.zeros_like(p) for n, p in packed.named_parameters()}
        for row, ends in enumerate(ENDS):
            for a, b in pairwise(ends):
                one = Model(**{f: getattr(model, f) for f in model.__struct_fields__} | {"seq_len": b - a})
                alone = Stage(ParameterFactory(3, *axes), one, range(2), knobs, meter)
                total = cross_entropy(alone(tokens[row : row + 1, a:b]), targets[row : row + 1, a:b], tp)
                total.backward()
                apart += float(total.detach())
                for n, p in alone.named_parameters():
                    assert p.grad is not None
                    grads[n] += p.grad
        assert float(loss.detach()) == pytest.approx(apart, rel=1e-13)
        for n, p in packed.named_parameters():
            torch.testing.assert_close(p.grad, grads[n], rtol=1e-9, atol=1e-12, msg=n)
    finally:
        torch.set_default_dtype(torch.float32)


def by_hand(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, window: int | None = None) -> list[Tensor]:
    """Output and gradients, computed from the full matrix of attention scores."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in leaves[1:])
    at = torch.arange(q.shape[2])
    hidden = (at > at[:, None]) | (at < STARTS[:, None, :, None])
    if window:
        hidden |= at <= at[:, None] - window
    out = (leaves[0] @ keys.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def flex_by_hand(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, enable_gqa: bool, return_aux: AuxRequest
) -> tuple[Tensor, AuxOutput]:
    """The result of flex attention, computed from the full matrix of attention scores."""
    assert enable_gqa and return_aux.lse
    (B, H, Q, _), K = q.shape, k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    rows = torch.arange(B)[:, None, None]
    seen = block_mask.mask_mod(rows, torch.tensor(0), torch.arange(Q)[:, None], torch.arange(K)).unsqueeze(1)
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)).exp()
    return weights @ v, AuxOutput(lse=lse)


@pytest.mark.exhaustive
def test_flex_attention_under_its_block_mask() -> None:
    """Compares outputs but no gradients, because PyTorch has no CPU backward for flex attention."""
    q, k, v, _ = inputs(2, 4, 2, W, torch.float32)
    at = torch.arange(W)
    mask = visible_blocks(Positions(at, at, STARTS))
    out, lse = document_attention.forward(q, k, v, mask)
    by_hand_out, aux = flex_by_hand(q, k, v, mask, True, AuxRequest(lse=True))
    torch.testing.assert_close(out, by_hand_out)
    torch.testing.assert_close(lse, aux.lse)


@pytest.mark.parametrize("kernel", ["mask", "flex"])
@pytest.mark.parametrize(
    ("method", "cp", "H", "G"),
    [("ring", 1, 4, 2), ("ring", 2, 4, 2), ("ring", 4, 4, 1), ("ulysses", 2, 4, 2), ("ulysses", 4, 4, 2)],
)
def test_over_context_parallel_ranks(
    method: str, cp: int, H: int, G: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "flex":  # torch has no backward of flex attention on a CPU
        monkeypatch.setattr(
            document_attention, "added_to_scores", lambda positions, _: visible_blocks(positions)
        )
        monkeypatch.setattr(document_attention, "flex_attention", flex_by_hand)
    whole = inputs(2, H, G, W)

    def rank(axis: ThreadAxis) -> list[Tensor]:
        context = ContextParallel(axis, axis, method)
        documents = context.documents(STARTS, torch.float64, None)
        assert isinstance(documents.masks[0], BlockMask) == (kernel == "flex")
        leaves = [cut(x, 2, cp, axis.rank).requires_grad_() for x in whole[:3]]
        out = context.attend(*leaves, None, documents)
        return [out.detach(), *torch.autograd.grad(out, leaves, cut(whole[3], 2, cp, axis.rank))]

    truth = by_hand(*whole)
    for n, results in enumerate(on_each(cp, rank)):
        for mine, true in zip(results, truth, strict=True):
            torch.testing.assert_close(mine, cut(true, 2, cp, n), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("S", [768, 1000])
def test_blocks_of_flex_attention(S: int, window: int | None) -> None:
    """The listed blocks equal those of torch's `create_block_mask`, which evaluates the mask for every (query, key)
    pair."""
    ends = torch.rand(2, S - 1, generator=torch.Generator().manual_seed(1)) < 0.002
    starts = torch.from_numpy(starts_of(ends.numpy()))
    at = torch.arange(S)
    mine = visible_blocks(Positions(at, at, starts, window))
    torchs = create_block_mask(mine.mask_mod, 2, None, S, S, device="cpu")
    assert torch.equal(mine.to_dense(), torchs.to_dense())
    assert torch.equal(mine.full_kv_num_blocks, torchs.full_kv_num_blocks)
    assert int(torchs.full_kv_num_blocks.sum()) > 0
    seen = torch.ones(S, S, dtype=torch.bool).tril() & (at >= starts.unsqueeze(-1))
    if window:
        seen = seen.triu(1 - window)
    pairs = mine.mask_mod(torch.arange(2)[:, None, None], torch.tensor(0), at[:, None], at)
    assert torch.equal(pairs, seen)


def test_starts_of_bytes() -> None:
    """A zero byte ends a document; it belongs to the document that it ends."""
    text = np.frombuffer(b"ab\0c\0\0defgh" * 3, np.uint8)
    batch = Corpus(text).windows(10, 4, 1, documents=True).batch(0, 0, 4)
    assert batch.starts is not None
    for row, starts in zip(batch.tokens, batch.starts, strict=True):
        expected = [max([0, *(p + 1 for p in range(at) if row[p] == 0)]) for at in range(10)]
        assert starts.tolist() == expected
