"""Compares ring and Ulysses attention with torch's attention on the whole sequence, and tests the zigzag split."""

import threading
from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.kernels import flash_attention
from engine.parallel.context.context_parallel import ATTENTION_METHODS
from engine.parallel.context.ring_attention import visible_block
from engine.parallel.context.sequence_split import SequenceSlices, positions, zigzag_pieces
from engine.train.batches.corpus import Corpus
from engine.train.batches.samples import Samples
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.parallel.thread_axis import ThreadAxis, on_each

WIDTH = 16


def cut(x: Tensor, dim: int, cp: int, rank: int) -> Tensor:
    return x.index_select(dim, positions(x.shape[dim], cp, rank))


def inputs(B: int, H: int, G: int, W: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = ((B, H, W, WIDTH), (B, G, W, WIDTH), (B, G, W, WIDTH), (B, H, W, WIDTH))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def by_torch(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    """The attention output, and the gradients of q, k and v, as PyTorch computes them."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("method", ATTENTION_METHODS)
@pytest.mark.parametrize(
    ("cp", "H", "G"), [(2, 2, 2), (2, 4, 2), (2, 4, 1), (4, 4, 4), (4, 8, 2), (3, 3, 3), (3, 6, 1)]
)
def test_equals_torch_on_the_whole_sequence(method: str, cp: int, H: int, G: int) -> None:
    whole = inputs(2, H, G, 2 * cp * 5)

    def rank(axis: ThreadAxis) -> list[Tensor]:
        q, k, v, grad = (cut(x, 2, cp, axis.rank) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ATTENTION_METHODS[method](*leaves, axis)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    truth = by_torch(*whole)
    for n, results in enumerate(on_each(cp, rank)):
        for mine, true in zip(results, truth, strict=True):
            torch.testing.assert_close(mine, cut(true, 2, cp, n), rtol=1e-12, atol=1e-13)


def by_hand(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, window: int) -> list[Tensor]:
    """Output and gradients of sliding-window attention, computed from all attention scores and a mask."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in leaves[1:])
    scores = leaves[0] @ keys.mT / q.shape[-1] ** 0.5
    at = torch.arange(q.shape[2])
    hidden = (at > at[:, None]) | (at <= at[:, None] - window)
    out = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("window", [1, 7, 8, 29, 30, 100])  # of 30 tokens
@pytest.mark.parametrize(("cp", "H", "G"), [(1, 4, 2), (3, 3, 3), (3, 6, 1)])
def test_a_window_over_ulysses(window: int, cp: int, H: int, G: int) -> None:
    whole = inputs(2, H, G, 30)

    def rank(axis: ThreadAxis) -> list[Tensor]:
        q, k, v, grad = (cut(x, 2, cp, axis.rank) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ATTENTION_METHODS["ulysses"](*leaves, axis, window)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    truth = by_hand(*whole, window)
    for n, results in enumerate(on_each(cp, rank)):
        for mine, true in zip(results, truth, strict=True):
            torch.testing.assert_close(mine, cut(true, 2, cp, n), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", ATTENTION_METHODS)
@pytest.mark.parametrize("width", [8, 24])
def test_values_of_another_width(method: str, width: int) -> None:
    """Values have a smaller or larger head dimension than queries and keys, as in latent attention."""
    q, k, _, _ = inputs(2, 4, 4, 32)
    v, grad = (torch.randn(2, 4, 32, width, dtype=torch.float64) for _ in range(2))

    def rank(axis: ThreadAxis) -> list[Tensor]:
        *rows, upstream = (cut(x, 2, 2, axis.rank) for x in (q, k, v, grad))
        leaves = [x.requires_grad_() for x in rows]
        out = ATTENTION_METHODS[method](*leaves, axis)
        return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]

    truth = by_hand(q, k, v, grad, 32)
    for n, results in enumerate(on_each(2, rank)):
        for mine, true in zip(results, truth, strict=True):
            torch.testing.assert_close(mine, cut(true, 2, 2, n), rtol=1e-12, atol=1e-13)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_half_precision_stays_near_fp64(method: str, device: str) -> None:
    near_the_truth(method, device)


def near_the_truth(method: str, device: str) -> None:
    """Compares the output and the gradients in bf16 on 4 ranks with those in fp64 on one rank."""
    whole = inputs(1, 4, 2, 64, torch.bfloat16)

    def rank(axis: ThreadAxis) -> list[Tensor]:
        q, k, v, grad = (cut(x, 2, 4, axis.rank).to(device) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = ATTENTION_METHODS[method](*leaves, axis)
        # With multithreading, all ranks would use the one backward thread of the GPU, which would wait for itself.
        with torch.autograd.set_multithreading_enabled(False):
            return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    truth = by_torch(*(x.double() for x in whole))
    for n, results in enumerate(on_each(4, rank)):
        for mine, true in zip(results, truth, strict=True):
            assert mine.dtype == torch.bfloat16
            true = cut(true, 2, 4, n)
            assert (mine.cpu() - true).norm() < 0.01 * true.norm()


@pytest.mark.parametrize("method", ATTENTION_METHODS)
def test_kernels_get_a_contiguous_log_sum_exp(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA kernel ignores the strides of the log-sum-exp. The CPU kernel respects the strides, so this test passes
    it the log-sum-exp's memory as if it were contiguous, which is how the CUDA kernel reads it."""
    kernel = flash_attention.backward

    def by_pointer(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> object:
        B, H, Q = lse.shape
        return kernel(grad, q, k, v, out, lse.as_strided((B, H, Q), (H * Q, Q, 1)), causal)

    monkeypatch.setattr(flash_attention, "backward", by_pointer)
    near_the_truth(method, "cpu")


@pytest.mark.parametrize("cp", range(1, 9))
def test_a_ring_covers_the_causal_mask_exactly(cp: int) -> None:
    """Each pair of a query and an earlier key (or the query's own key) is in exactly one visible block, and no other
    pair is in a visible block."""
    W = 4 * cp
    for rank in range(cp):
        mine = positions(W, cp, rank)
        seen = torch.zeros(W // cp, W, dtype=torch.int64)
        for owner in range(cp):
            at = visible_block(rank, owner, W // cp)
            theirs = positions(W, cp, owner)
            block = torch.zeros(W // cp, W // cp, dtype=torch.int64)
            block[at.queries, at.keys] = 1
            seen[:, theirs] += block.tril() if at.causal else block
        assert torch.equal(seen, (mine[:, None] >= torch.arange(W)).long())


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_a_ring_balances_the_work_of_the_ranks(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the (query, key) pairs that reach the kernels in forward and backward."""
    work: Counter[tuple[int, str]] = Counter()
    S = 8

    def counted(name: str, q_at: int) -> None:
        kernel = getattr(flash_attention, name)

        def run(*args: object) -> object:
            q, k, causal = args[q_at], args[q_at + 1], args[-1]
            Q, K = q.shape[2], k.shape[2]  # type: ignore[attr-defined]
            work[threading.get_ident(), name] += Q * (Q + 1) // 2 if causal else Q * K
            return kernel(*args)

        monkeypatch.setattr(flash_attention, name, run)

    counted("forward", 0)
    counted("backward", 1)
    whole = inputs(1, 2, 2, cp * S)

    def rank(axis: ThreadAxis) -> int:
        q, k, v, grad = (cut(x, 2, cp, axis.rank) for x in whole)
        ATTENTION_METHODS["ring"](q.requires_grad_(), k, v, axis).backward(grad)
        return threading.get_ident()

    on_each(cp, rank)
    everything = cp * S * (cp * S + 1) // 2  # number of pairs that one causal sequence has
    assert len(work) == 2 * cp
    assert set(work.values()) == {everything // cp}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("plain", [True, False])
def test_blocks_merge_to_the_whole(
    device: str, dtype: torch.dtype, G: int, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computes attention over two blocks of keys, the second of them causal, merges the results, and compares them with
    torch's attention over all keys. `plain` tests the path without a fused kernel."""
    monkeypatch.setattr(flash_attention, "ROWS", 5)
    forward = flash_attention.plain_forward if plain else flash_attention.forward
    backward = flash_attention.plain_backward if plain else flash_attention.backward
    S = 16
    q, k, v, grad = (x.to(device) for x in inputs(2, 4, G, 2 * S, dtype))
    # The queries of the second half attend to all keys of the first half.
    q, grad = q[:, :, S:], grad[:, :, S:]
    blocks = [(k[:, :, :S], v[:, :, :S], False), (k[:, :, S:], v[:, :, S:], True)]
    (out, lse), more = (forward(q, *block) for block in blocks)
    total = out.to(lse.dtype)
    flash_attention.merge(total, lse, *more)
    out = total.to(dtype)
    grads = [backward(grad, q, keys, values, out, lse, causal) for keys, values, causal in blocks]
    d_q = grads[0][0] + grads[1][0]
    d_k, d_v = (torch.cat([g[n] for g in grads], 2) for n in (1, 2))

    everything = [x.double().cpu() for x in inputs(2, 4, G, 2 * S, dtype)]
    everything[3][:, :, :S] = 0.0
    truth = by_torch(*everything)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for mine, true in zip(
        (out, d_q, d_k, d_v), (truth[0][:, :, S:], truth[1][:, :, S:], *truth[2:]), strict=True
    ):
        assert (mine.cpu() - true).norm() < tolerance * true.norm()


# ----------------------------------------------------------------------------------------------------- the split


@pytest.mark.parametrize(
    ("cp", "tp", "pieces"),
    [
        (1, 1, [[0]]),
        (1, 3, [[0], [1], [2]]),
        (2, 1, [[0, 3], [1, 2]]),
        (2, 2, [[0, 1], [6, 7], [2, 3], [4, 5]]),
        (2, 3, [[0, 1], [2, 9], [10, 11], [3, 4], [5, 6], [7, 8]]),
        (4, 1, [[0, 7], [1, 6], [2, 5], [3, 4]]),
    ],
)
def test_pieces_by_rank(cp: int, tp: int, pieces: list[list[int]]) -> None:
    assert zigzag_pieces(cp, tp) == pieces


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (3, 2)])
def test_slices_count_over_the_whole_sequence(cp: int, tp: int) -> None:
    W, E = 4 * cp * tp, 3
    chosen = torch.randint(0, 2, (2, W, E), generator=torch.Generator().manual_seed(3))

    def rank(axis: ThreadAxis) -> None:
        of_cp = positions(W, cp, axis.rank // tp)
        mine = of_cp.chunk(tp)[axis.rank % tp]
        slices = SequenceSlices(axis, cp)
        assert torch.equal(slices.own_slice(chosen), chosen[:, mine])
        assert torch.equal(slices.gather(chosen[:, mine]), chosen)
        place, total = slices.earlier_choices(chosen[:, mine])
        assert torch.equal(total, chosen.sum(1))
        assert torch.equal(slices.start_totals(chosen[:, mine])(), chosen.sum(1))
        assert torch.equal(place, (chosen.cumsum(1) - chosen)[:, mine])
        assert slices.count == cp * tp

    on_each(cp * tp, rank)


def test_cp_ranks_read_the_tokens_of_one_sample() -> None:
    corpus = Corpus(torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(1)).byte().numpy())
    tokens, targets, _ = Samples(corpus, 24, 4, 9).batch(3, 1, 2)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    for rank in range(3):
        at = positions(24, 3, rank)
        mine = Samples(corpus, 24, 4, 9, at).batch(3, 1, 2)
        assert torch.equal(mine[0], tokens[:, at]) and torch.equal(mine[1], targets[:, at])


LONG = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "knobs.micro_batches=1"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["grid.cp=4"], None),
        (["grid.cp=4", "grid.ep=4"], None),
        (["grid.cp=2", "grid.tp=2", "grid.ep=4", "model.seq_len=8"], None),
        (["grid.cp=4", "grid.cp_method=ulysses"], None),  # each of 2 kv_heads is sent to two ranks
        (["grid.cp=2", "grid.tp=2", "grid.cp_method=ulysses"], None),
        (["grid.cp=3", "model.seq_len=48"], None),
        (
            ["grid.cp=3"],
            "cuts a sequence into 2 x cp x tp = 6 pieces, which do not divide model.seq_len = 64",
        ),
        (["grid.cp=2", "grid.tp=2", "model.seq_len=12"], "model.seq_len = 12; legal: a multiple of 8"),
        (
            ["grid.cp=8", "grid.cp_method=ulysses"],
            "the 4 heads and 2 kv_heads of a tp rank evenly; legal: 1, 2, 4,",
        ),
        (["grid.cp=4", "grid.tp=2", "grid.cp_method=ulysses"], "the 2 heads and 1 kv_heads"),
        (
            ["grid.cp=3", "grid.cp_method=ulysses", "model.seq_len=48", "model.heads=6", "model.d_model=48"],
            "grid.cp = 3 does not distribute the 6 heads and 2 kv_heads of a tp rank evenly; legal: 1, 2, 6, or",
        ),
        (["grid.cp=2", "train.zero=0"], "train.zero = 0 shards nothing, but grid.cp = 2"),
        (["grid.cp=2", "grid.ep=4"], "grid.ep = 4 does not divide dp_shard x cp x tp = 2"),
        (["grid.cp_method=striped"], "grid.cp_method = 'striped' is not legal; legal: ulysses, ring"),
    ],
)
def test_layouts_over_cp(overrides: list[str], sentence: str | None) -> None:
    if sentence is None:
        assert load(DEMO, LONG + overrides).ranks.cp == load(DEMO, LONG + overrides).grid.cp
        return
    with pytest.raises(LayoutError) as refusal:
        load(DEMO, LONG + overrides)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
