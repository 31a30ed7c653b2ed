"""Compares compressed gradient reductions with a reference over several steps; each replica is a thread."""

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn

from engine.config.compression import METHODS, CompressionValues, Method
from engine.planner.workload.communication.compressed_gradients import messages
from engine.planner.workload.operations import sent_bytes
from engine.sharding.compression import reductions
from engine.sharding.compression.reductions import Compression, Segment
from tests.unit.engine.parallel.compression_reference import low_rank, summed
from tests.unit.engine.parallel.thread_axis import ThreadAxis, on_each

P, STEPS, SEED = 3, 4, 11
# The one-dimensional shapes are smaller than `min_elements`, or have no factors.
SHAPES = [
    (40, 30),
    (7,),
    (3, 20, 26),
    (500,),
]
LOSSY = [method for method in METHODS if method != "none"]


def values_of(method: Method, **more: float) -> CompressionValues:
    return CompressionValues(
        method, **({"ratio": 0.1, "threshold": 1.2, "rank": 3, "min_elements": 64} | more)
    )  # type: ignore[arg-type]


def gradients(rank: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    n = sum(map(prod, SHAPES))
    return [
        torch.randn(n, generator=generator, dtype=torch.float64).to(dtype) * 10.0 ** (step % 2)
        for step in range(STEPS)
    ]


def segments() -> list[Segment]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    starts = [sum(map(prod, SHAPES[:n])) for n in range(len(SHAPES))]
    return [
        Segment(p, f"w{n}", start, shape)
        for n, (p, start, shape) in enumerate(zip(parameters, starts, SHAPES, strict=True))
    ]


class Ran:
    """The results of one replica: the sum and the residual after each step, and the bytes that it sent in a step."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.residuals: list[Tensor] = []
        self.bytes = 0


def run(
    axis: ThreadAxis, values: CompressionValues, given: Callable[[int], list[Tensor]], scale: float = 1.0
) -> Ran:
    compression, parts, ran = Compression(axis, SEED), segments(), Ran()
    for step, gradient in enumerate(given(axis.rank)):
        axis.meter.start_step(step)
        compression.begin(step, values, scale)
        flat = gradient.clone() * scale
        running = compression.start(0, parts, flat)
        while not running.advance():
            pass
        compression.settle(updated=bool(flat.isfinite().all()))
        ran.sums.append(flat / scale)
        zero = torch.zeros(1, dtype=torch.float64)
        ran.residuals.append(
            torch.cat([compression.residuals.get(s.parameter, zero.expand(s.shape)).flatten() for s in parts])
        )
        ran.bytes = axis.meter.readings.replica_bytes
    return ran


def reference(
    values: CompressionValues, step_gradients: list[list[Tensor]]
) -> list[tuple[Tensor, list[Tensor]]]:
    """For each step, the expected sum of the replicas' compressed gradients, and each replica's expected residual."""
    n = len(step_gradients[0][0])
    residuals = [torch.zeros(n, dtype=torch.float64) for _ in range(P)]
    spans, at = [], 0
    for shape in SHAPES:
        spans.append(slice(at, at + prod(shape)))
        at += prod(shape)
    factored = values.method == "power_sgd"
    compressed = [0, 2] if factored else [0, 2, 3]
    elements = torch.cat([torch.arange(n)[spans[k]] for k in compressed])
    starts = {
        k: [
            start.numpy()
            for start in torch.randn(
                (1 if len(SHAPES[k]) == 2 else SHAPES[k][0], SHAPES[k][-1], values.rank),
                generator=torch.Generator().manual_seed(reductions._number(SEED, f"w{k}")),
            ).double()
        ]
        for k in ((0, 2) if factored else ())
    }
    results = []
    for step in range(STEPS):
        xs = [step_gradients[rank][step] + residuals[rank] for rank in range(P)]
        total = torch.stack(xs).sum(0)
        sent = [x.clone() for x in xs]
        if factored:
            for k in starts:
                (part, parts), starts[k] = low_rank([x[spans[k]] for x in xs], SHAPES[k], starts[k])
                total[spans[k]] = part
                for s, own in zip(sent, parts, strict=True):
                    s[spans[k]] = own
        else:
            seed = reductions._number(SEED, step, 0)
            drawn = torch.randperm(len(elements), generator=torch.Generator().manual_seed(seed))
            part, parts = summed([x[elements] for x in xs], values, drawn)
            total[elements] = part
            for s, own in zip(sent, parts, strict=True):
                s[elements] = own
        residuals = [x - s for x, s in zip(xs, sent, strict=True)]
        results.append((total, residuals))
    return results


@pytest.mark.parametrize("method", LOSSY)
def test_sums_and_residuals_equal_those_of_one_process(method: Method) -> None:
    values = values_of(method)
    ranks = on_each(P, lambda axis: run(axis, values, gradients))
    expected = reference(values, [gradients(rank) for rank in range(P)])
    for step, (total, residuals) in enumerate(expected):
        for rank in range(P):
            torch.testing.assert_close(ranks[rank].sums[step], total, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(ranks[rank].residuals[step], residuals[rank], rtol=1e-9, atol=1e-9)
            assert torch.equal(ranks[rank].sums[step], ranks[0].sums[step])
        assert any(residual.abs().max() > 0 for residual in residuals), "nothing was left out"


@pytest.mark.parametrize("method", LOSSY)
def test_no_part_of_a_gradient_is_lost(method: Method) -> None:
    """Over all steps, the reduced gradients and the last residuals add up to the gradients. The loss scale has no
    effect, because residuals are kept in units of the unscaled gradient."""
    for scale in (1.0, 1024.0):
        ranks = on_each(P, lambda axis, scale=scale: run(axis, values_of(method), gradients, scale))
        given = torch.stack([sum(gradients(rank)) for rank in range(P)]).sum(0)
        arrived = sum(ranks[0].sums) + sum(ran.residuals[-1] for ran in ranks)
        torch.testing.assert_close(arrived, given, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "values",
    [values_of("top_k", ratio=1.0), values_of("random_k", ratio=1.0), values_of("threshold", threshold=0.0)],
)
def test_lossless_settings_sum_exactly(values: CompressionValues) -> None:
    plain = on_each(P, lambda axis: run(axis, values_of("none"), gradients))
    ranks = on_each(P, lambda axis: run(axis, values, gradients))
    for step in range(STEPS):
        torch.testing.assert_close(ranks[0].sums[step], plain[0].sums[step], rtol=1e-12, atol=1e-12)


def test_low_rank_sum_at_full_rank_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test disables the rule that a matrix is sent uncompressed if its factors are not smaller."""
    monkeypatch.setattr(
        reductions, "is_compressed", lambda values, shape, size: values.method != "none" and len(shape) > 1
    )
    plain = on_each(P, lambda axis: run(axis, values_of("none"), gradients))
    ranks = on_each(P, lambda axis: run(axis, values_of("power_sgd", rank=64), gradients))
    for step in range(STEPS):
        torch.testing.assert_close(ranks[0].sums[step], plain[0].sums[step], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_infinite_gradient_is_seen_and_leaves_no_trace(method: Method, bad: float) -> None:
    """If the gradient of one replica is not finite, every replica gets a sum that is not finite. The step is skipped,
    and it has no effect on the following steps."""

    def spoiled(rank: int) -> list[Tensor]:
        first, second, third, _ = gradients(rank)
        broken = second.clone()
        if rank == 1:
            broken[1234] = bad
        return [first, broken, third]

    values = values_of(method)
    ranks = on_each(P, lambda axis: run(axis, values, spoiled))
    for ran in ranks:
        assert not ran.sums[1].isfinite().all()
        assert torch.equal(ran.residuals[1], ran.residuals[0])
        assert ran.sums[2].isfinite().all() and ran.residuals[2].isfinite().all()


@pytest.mark.parametrize("method", [method for method in METHODS if method != "threshold"])
def test_bytes_equal_the_formula(method: Method) -> None:
    values = values_of(method)
    ranks = on_each(P, lambda axis: run(axis, values, lambda rank: gradients(rank, torch.float32)))
    assert ranks[0].bytes == sum(sent_bytes(each.kind, each.size, P) for each in messages(values, SHAPES, P))


def test_threshold_sends_the_elements_above_the_bound() -> None:
    """Every replica's message is as long as the longest one: 8 bytes per element, plus 8 bytes for the number of
    elements."""
    values = values_of("threshold", min_elements=500)
    ranks = on_each(P, lambda axis: run(axis, values, lambda rank: gradients(rank, torch.float32)[:1]))
    elements = torch.cat((torch.arange(1200), torch.arange(1207, 1207 + 1560 + 500)))
    parts = [gradients(rank, torch.float32)[0][elements] for rank in range(P)]
    longest = max(int((x.abs() > values.threshold * x.square().mean().sqrt()).sum()) for x in parts)
    assert 0 < longest < len(elements) / 2
    exact = 2 * 7 * 4 * (P - 1) // P
    assert [ran.bytes for ran in ranks] == [exact + (P - 1) * (8 + 8 * longest)] * P
