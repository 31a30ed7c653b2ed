"""Recomputes the communication numbers in the source documents: latency, bandwidth, crossover sizes, CCR, ridge points,
bytes and times.

The source documents are four documents on distributed training from which this project began. Text A is "Training
doesn't fail because of FLOPs", text B is "Parallel processing fundamentals", text C is "03 - Parallelism and
Efficiency", and text D is the guide that covers the roofline. "D 3.5" means section 3.5 of text D, and "A 02" means
section 02 of text A. RIGHT lists the numbers that agree with the planner. The numbers that do not agree with it are in
`test_source_texts_wrong_communication.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2

import pytest

from engine.config.grid import Grid
from engine.planner.hardware.description import Device, Efficiency, Hardware, Link
from engine.planner.hardware.table import hardware
from engine.planner.roofline import crossover, ddp_ccr, ridge, roof
from engine.planner.timing.collectives import collective_time
from engine.planner.timing.costs import ALGORITHMS, cost
from engine.planner.timing.pipeline import pipeline_time
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import total
from tests.unit.engine.counts import published_models as models

MB, GB, TB, KIB = 1e6, 1e9, 1e12, 1024
H100, A100 = hardware("H100").device.peak["bf16"], hardware("A100-80").device.peak["bf16"]


@dataclass(frozen=True)
class Number:
    """A number in a source document: its section, its value, the computed value, and a relative tolerance that allows
    for the document's rounding."""

    where: str
    said: float
    computed: Callable[[], float]
    within: float = 0.01


def transfer(size: float, bandwidth: float) -> float:
    """Seconds to send one message over a link without latency."""
    flat = Hardware(
        "flat",
        Device(1.0, 1e18, {"bf16": 1.0}, ""),
        (Link("link", None, 0.0, bandwidth, ""),),
        Efficiency(link=1.0),
    )
    return collective_time("send", size, 2, 1, flat)


def tp_layer(micro_batch: int, tp: int, hidden: int = 12288) -> float:
    """Bytes that a rank sends over tp for one layer and micro-batch, in forward and backward. In the engine, a layer
    has eight all-gathers and reduce-scatters, which together send as much as four all-reduces. The result is the
    difference between a model of two layers and a model of one, because the embedding and the head also send bytes."""
    two, one = (
        traffic(
            Job(
                models.gpt(layers, hidden, 96, 51200, 2048),
                2048,
                micro_batch,
                micro_batch,
                Grid(tp=tp),
                framework="engine",
            ),
        )["tp"]
        for layers in (2, 1)
    )
    replicated = 2 * (tp - 1) * 2 * (2 * hidden) * 4 / tp  # gradients of the layer's norms, sent once a step
    return two - one - replicated


def pp_boundary(micro_batch: int, hidden: int, stages: int = 8) -> float:
    """Bytes sent over a stage boundary per micro-batch, in both directions. The result is the difference between steps
    of 33 and of 32 micro-batches, so that the gradients of the tied embedding, which are sent once per step, cancel
    out."""
    model = models.gpt(stages, hidden, 64, 51200, 2048)
    more, less = (
        traffic(Job(model, 2048, m * micro_batch, micro_batch, Grid(pp=stages)), 0)["pp"] for m in (33, 32)
    )
    return 2 * (more - less)


def data_parallel(zero: int, micro_batches: int = 1) -> float:
    """Bytes that a rank sends over dp in a step, divided by the size of the layers in bytes, and extrapolated from 64
    ranks to infinitely many. The embedding and the head are left out, as in the source document."""
    sent = []
    for layers in (2, 1):
        model = models.gpt(layers, 1024, 16, 512, 128)
        batch = 64 * micro_batches
        job = Job(model, 128, batch, 1, Grid(dp_shard=64), precision="fp32", zero=zero, framework="engine")
        sent.append((traffic(job, 0)["dp"], 4 * total(model)))
    (more, size), (less, smaller) = sent
    return (more - less) / (size - smaller) * 64 / 63


def bubble(name: str, stages: int, virtual_stages: int, micro_batches: int) -> float:
    """Idle share of a pipeline with equal stages."""
    times = [1.0 / virtual_stages] * stages * virtual_stages, [2.0 / virtual_stages] * stages * virtual_stages
    window = pipeline_time(name, stages, virtual_stages, micro_batches, *times)
    return 1 - 3 * micro_batches / window


CROSSOVERS = {  # latency in microseconds, bandwidth in GB/s, crossover in KiB as the text prints it
    "NVLink 4.0": (1.0, 450, 450),
    "InfiniBand HDR": (1.5, 200, 300),
    "100GbE RoCE": (5.0, 12.5, 62.5),
    "TCP/IP Ethernet": (50, 12.5, 625),
}
DDP = {  # parameters; GB of an all-reduce in fp32 and in bf16; seconds in bf16 at 200 GB/s
    "ResNet-50": (25e6, 0.2, 0.1, 0.5e-3),
    "BERT-Large": (340e6, 2.7, 1.4, 7e-3),
    "GPT-2 XL": (1.5e9, 12, 6, 30e-3),
    "Llama-7B": (7e9, 56, 28, 0.14),
    "Llama-70B": (70e9, 560, 280, 1.4),
}
BATCHES = {1: 3072.0, 4: 12288.0, 16: 49152.0, 64: 196608.0, 256: 786432.0}
SENT = {  # D 3.5, 4.4, 5.2: number of steps, and sent share of the buffer, for p ranks
    ("all_reduce", "naive"): (lambda p: 2 * (p - 1), lambda p: 2 * (p - 1)),
    ("all_reduce", "tree"): (lambda p: 2 * log2(p), lambda p: 2 * log2(p)),
    ("all_reduce", "ring"): (lambda p: 2 * (p - 1), lambda p: 2 * (p - 1) / p),
    ("all_reduce", "halving-doubling"): (lambda p: 2 * log2(p), lambda p: 2 * (p - 1) / p),
    ("reduce_scatter", "halving"): (log2, lambda p: (p - 1) / p),
    # share of the gathered buffer, which has p times the bytes of a rank
    ("all_gather", "doubling"): (
        log2,
        lambda p: (p - 1) / p,
    ),
    ("all_gather", "ring"): (lambda p: p - 1, lambda p: (p - 1) / p),
    ("reduce_scatter", "ring"): (lambda p: p - 1, lambda p: (p - 1) / p),
    ("all_to_all", "direct"): (lambda p: p - 1, lambda p: (p - 1) / p),
}
RIGHT = [
    Number("D 5.1: beta of 450 GB/s, ps a byte", 2.22, lambda: 1e12 * transfer(1, 450 * GB)),
    Number("D 5.1: 1 GB over NVLink 4, ms", 2.2, lambda: 1e3 * transfer(GB, 450 * GB), 0.02),
    *[
        Number(
            f"D 5.4: n* of {name}, kB", kilobytes, lambda a=alpha, b=rate: crossover(a * 1e-6, b * GB) / 1e3
        )  # type: ignore[misc]
        for name, (alpha, rate, kilobytes) in CROSSOVERS.items()
    ],
    *[
        Number(f"D 6.2: CCR of GPT-3, batch {batch}", ccr, lambda n=batch: ddp_ccr(n * 2048), 1e-9)  # type: ignore[misc]
        for batch, ccr in BATCHES.items()
    ],
    Number("D 6.3: 312 TFLOP/s over 900 GB/s", 350, lambda: ridge(A100, 900 * GB), 0.02),
    Number(
        "D 6.3: 8 x H100 by its peak of 1,979, FLOP/byte", 2200, lambda: ridge(8 * 1979e12, 7.2 * TB), 0.01
    ),
    Number("D 6.7: 8 x A100, 2,496 TFLOP/s over 4.8 TB/s", 520, lambda: ridge(8 * A100, 4.8 * TB)),
    Number("D 6.7: 8 x H100 over 400 GB/s a node", 40_000, lambda: ridge(8 * 1979e12, 400 * GB), 0.02),
    *[
        Number(f"D 7.4: {name}, fp32, GB", fp32, lambda n=count: 2 * n * 4 / GB, 0.01)  # type: ignore[misc]
        for name, (count, fp32, _, _) in DDP.items()
    ],
    *[
        Number(f"D 7.4: {name}, bf16, GB", bf16, lambda n=count: 2 * n * 2 / GB, 0.03)  # type: ignore[misc]
        for name, (count, _, bf16, _) in DDP.items()
    ],
    *[
        Number(f"D 7.4: {name} at 200 GB/s, s", took, lambda n=count: transfer(2 * n * 2, 200 * GB), 0.03)  # type: ignore[misc]
        for name, (count, _, _, took) in DDP.items()
    ],
    Number("D 9.5: TP 8 sends 4 x 2 (T-1)/T B S H of 2 bytes, MB", 352.3, lambda: tp_layer(1, 8) / MB),
    Number(
        "D 8.4: ZeRO-3 sends 1.5 times what data parallelism sends",
        1.5,
        lambda: data_parallel(3) / data_parallel(0),
    ),
    Number("D 8.4 and 12.6: data parallelism sends 2 N", 2, lambda: data_parallel(0)),
    Number("D 8.4: ZeRO-1 sends 2 N", 2, lambda: data_parallel(1)),
    Number("D 8.4: ZeRO-2 sends 2 N", 2, lambda: data_parallel(2)),
    Number("D 10.6: efficiency of 8 stages and 32 micro-batches", 0.82, lambda: 1 - bubble("1f1b", 8, 1, 32)),
    Number(
        "D 12.1: activations of GPT-3 at a boundary, MB", 50, lambda: pp_boundary(1, 12288) / 2 / MB, 0.01
    ),
    Number(
        "D 12.1: buffers of four all-reduces of 2 sequences, MB",
        400,
        lambda: 4 * 2 * 2048 * 12288 * 2 / MB,
        0.01,
    ),
    Number(
        "A 02 and B: bytes over the model of a ring of many",
        2,
        lambda: cost("all_reduce", "ring", 10**6).sent,
        1e-5,
    ),
    Number("A 02: stages of one micro-batch idle, 8 of them", 0.875, lambda: bubble("gpipe", 8, 1, 1), 1e-9),
    Number("D 10.1: 4 of them", 0.75, lambda: bubble("gpipe", 4, 1, 1), 1e-9),
    Number("D 10.2: 4 stages, 4 micro-batches", 0.43, lambda: bubble("gpipe", 4, 1, 4)),
    Number("D 1.3: IB is 2 to 18 times slower than NVLink", 18, lambda: 900 / 50),
    Number("D 1.5: 400 Gb/s, GB/s", 50, lambda: 400 / 8),
    Number("D 1.3: eight ports of a node, GB/s", 400, lambda: 8 * 400 / 8),
]


@pytest.mark.parametrize("number", RIGHT, ids=lambda number: number.where)
def test_a_number_of_the_source_texts(number: Number) -> None:
    assert number.computed() == pytest.approx(number.said, rel=number.within)


@pytest.mark.parametrize("kind", SENT, ids=" ".join)
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_costs_of_collectives(kind: tuple[str, str], ranks: int) -> None:
    """Compares the planner's costs of collectives with the formulas in sections 3.5, 4.4 and 5.2 of the roofline guide
    (text D in this module's docstring)."""
    steps, sent = (formula(ranks) for formula in SENT[kind])
    found = cost(*kind, ranks)
    assert (found.steps, found.sent) == (pytest.approx(steps), pytest.approx(sent))


def test_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    """As in sections 2.7, 3.3 and 4.4 of source text D, an all-reduce takes the steps and the bytes of a reduce-scatter
    and an all-gather."""
    for ranks in (2, 8, 100):
        halves = cost("reduce_scatter", "ring", ranks), cost("all_gather", "ring", ranks)
        whole = cost("all_reduce", "ring", ranks)
        assert whole.steps == sum(half.steps for half in halves)
        assert whole.sent == pytest.approx(sum(half.sent for half in halves))


def test_when_to_use_which_all_reduce() -> None:
    """According to section 3.5 of the roofline guide (text D in this module's docstring), an algorithm with few steps
    is best for small messages, and one that sends few bytes is best for large messages. The guide advises against the
    naive algorithm (reduce, then broadcast) at scale; the planner never chooses it."""
    link = Link("link", None, 1e-6, 100 * GB, "")
    machine = Hardware("m", Device(1.0, 1e18, {"bf16": 1.0}, ""), (link,), Efficiency(link=1.0))
    # 2 log2(64) = 12 messages are enough, while a ring needs 126.
    assert collective_time("all_reduce", 1e3, 64, 1, machine) < 13e-6
    ring = cost("all_reduce", "ring", 64)
    assert collective_time("all_reduce", 1e10, 64, 1, machine) <= 1.001 * (
        ring.steps * 1e-6 + ring.sent * 1e10 / (100 * GB)
    )
    for size in (1e3, 1e6, 1e9):
        naive, tree = (
            found.steps * 1e-6 + found.sent * size / (100 * GB)
            for found in (cost("all_reduce", name, 64) for name in ("naive", "tree"))
        )
        assert collective_time("all_reduce", size, 64, 1, machine) <= min(naive, tree)
    assert "naive" not in ALGORITHMS["all_reduce"]


def test_a_hierarchy_crosses_the_slow_link_less() -> None:
    """According to section 3.6 of source text D, with 8 nodes of 8 ranks a phase has 7 steps over the slow link instead
    of 63. In the planner, each link out of a node carries at most n / 8 bytes in a phase."""
    machine = Hardware(
        "two levels",
        Device(1.0, 1e18, {"bf16": 1.0}, ""),
        (Link("inner", 8, 1e-6, 450 * GB, ""), Link("outer", None, 1e-5, 50 * GB, "")),
        Efficiency(link=1.0),
    )
    flat = Hardware("flat", machine.device, machine.links[1:], machine.efficiency)
    for size in (1e4, 1e8):
        assert collective_time("all_reduce", size, 64, 1, machine) < collective_time(
            "all_reduce", size, 64, 1, flat
        )


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 1), (4, 8, 2), (8, 32, 2)])
def test_bubbles(p: int, m: int, v: int) -> None:
    """For P ranks, M micro-batches and V stages per rank, the bubble is (P - 1) / (M V + P - 1) according to section
    10.4 of source text D; for V = 1, also according to text A (section 02), text B, and section 10.3 of text D."""
    name = "interleaved" if v > 1 else "1f1b"
    assert bubble(name, p, v, m) == pytest.approx((p - 1) / (m * v + p - 1))


def test_the_example_of_the_roofline() -> None:
    """D 6.6: GPT-3 with 32 sequences per device and step is compute-bound at 1,979 TFLOP/s and 900 GB/s, so it reaches
    the peak FLOP/s."""
    ccr, star = ddp_ccr(32 * 2048), ridge(1979e12, 900 * GB)
    assert ccr == pytest.approx(98_304) and star == pytest.approx(2199, abs=1)
    assert roof(ccr, 1979e12, 900 * GB) == 1979e12
    assert 32 * star / ccr == pytest.approx(0.716, abs=1e-3)  # critical batch


def test_efficiency_grows_with_the_batch_up_to_the_ridge() -> None:
    """As in section 6.5 of the roofline guide (text D in this module's docstring), the efficiency grows in proportion
    to the batch up to the ridge point."""
    star = ridge(H100, 50 * GB)
    rates = [roof(ddp_ccr(tokens), H100, 50 * GB) / H100 for tokens in (1024, 2048, 4096, 2**20)]
    assert (
        rates[1] == pytest.approx(2 * rates[0]) and rates[2] == pytest.approx(4 * rates[0]) and rates[3] == 1
    )
    assert ddp_ccr(2**20) > star
