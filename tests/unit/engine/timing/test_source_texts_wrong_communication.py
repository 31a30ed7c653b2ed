"""Compares wrong communication numbers in the source documents with the correct ones, and says why each is wrong. The
module `test_source_texts_communication.py` lists the source documents.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.config.grid import Grid
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import hardware
from engine.planner.roofline import crossover, ridge, roofline
from engine.planner.timing.costs import cost
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job
from tests.unit.engine.counts import published_models as models
from tests.unit.engine.timing.test_source_texts_communication import (
    A100,
    GB,
    H100,
    MB,
    TB,
    bubble,
    data_parallel,
    tp_layer,
)


@dataclass(frozen=True)
class Wrong:
    """A wrong number in a source document: its section, its value, the right value, a function that computes the right
    value, and the reason for the difference."""

    where: str
    said: float
    right: float
    computed: Callable[[], float]
    why: str


WRONG = [
    Wrong(
        "D 9.5: TP sends 175 MB in a layer of GPT-3",
        175,
        352.3,
        lambda: tp_layer(1, 8) / MB,
        "its own formula and code give 352 MB; 175 is half of that",
    ),
    Wrong(
        "D 9.5: 16.8 GB over 96 layers",
        16.8,
        33.8,
        lambda: 96 * tp_layer(1, 8) / GB,
        "96 x 352 MB, for each micro-batch and not for each iteration",
    ),
    Wrong(
        "D 5.3 figure: crossover of NVLink, KB (2 to 5)",
        5,
        450,
        lambda: crossover(1e-6, 450 * GB) / 1e3,
        "1 us x 450 GB/s, as its own code has it; 2 to 5 KB would need a latency of 10 ns",
    ),
    Wrong(
        "D 5.3 figure: crossover of 100 GbE, MB (5 to 10)",
        5,
        0.0625,
        lambda: crossover(5e-6, 12.5 * GB) / MB,
        "5 us x 12.5 GB/s; with 100 us it would be 1.25 MB",
    ),
    Wrong(
        "D 5.3 table of links: HDR moves 200 GB/s",
        200,
        25,
        lambda: 200 / 8,
        "HDR is 200 Gb/s a port, so n* is 37.5 kB and not 300 kB",
    ),
    Wrong(
        "D 6.3: 8 x H100 over NVLink, FLOP/byte",
        2200,
        1099,
        lambda: ridge(8 * H100, 7.2 * TB),
        "1,979 TFLOP/s is the sparse peak; dense is 989.4. With the 450 GB/s of one direction it is 2,199 again",
    ),
    Wrong(
        "D 6.7: multi-node H100, FLOP/byte",
        40_000,
        19_788,
        lambda: ridge(8 * H100, 400 * GB),
        "the sparse peak again",
    ),
    Wrong(
        "D 1.5: 989 TFLOP/s of TF32 on H100",
        989,
        494.7,
        lambda: H100 / 2e12,
        "sparse; dense TF32 is half of dense bf16",
    ),
    Wrong("D 1.5: 624 TFLOP/s of bf16 on A100", 624, 312, lambda: A100 / 1e12, "sparse"),
    Wrong(
        "D 12.1: four all-reduces of 2 sequences over TP 8 move 400 MB",
        400,
        705,
        lambda: tp_layer(2, 8) / MB,
        "400 MB are the buffers; a ring sends 2 (T-1)/T of each",
    ),
    Wrong(
        "D 4.5: FSDP sends 3 N for each layer x number of layers",
        3 * 96,
        3,
        lambda: data_parallel(3),
        "3 times each layer's own parameters, which over all layers is 3 N (D 8.4)",
    ),
    Wrong(
        "D 8.4 and 12.6: ZeRO-3 sends 3 N an iteration (4 micro-batches)",
        3,
        12,
        lambda: data_parallel(3, micro_batches=4),
        "3 N a micro-batch: weights are gathered twice and gradients reduced in each",
    ),
    Wrong(
        "D 5.5 figure: an all-reduce of 32 x 4096 x 12288 in bf16, GB",
        3.0,
        3.22,
        lambda: 32 * 4096 * 12288 * 2 / GB,
        "3.2 GB, or 3 GiB",
    ),
    Wrong(
        "D 10.1: with one micro-batch each of 8 stages is active 2/P of the time",
        2 / 8,
        1 / 8,
        lambda: 1 - bubble("gpipe", 8, 1, 1),
        "two slots of 2 P: 1/P, as its own bubble (P-1)/P says",
    ),
    Wrong(
        "D 11.3: data parallelism sends 2 N/P x 2 (D-1)/D",
        2 * 2 * 3 / 4,
        2 * 3 / 4,
        lambda: cost("all_reduce", "ring", 4).sent,
        "2 (D-1)/D is the ring all-reduce already: the other factor 2 counts it twice",
    ),
]


@pytest.mark.parametrize("number", WRONG, ids=lambda number: number.where)
def test_a_wrong_number_of_the_source_texts(number: Wrong) -> None:
    assert number.computed() == pytest.approx(number.right, rel=0.005), number.why
    assert number.said != pytest.approx(number.right, rel=0.05)


def test_moe_sends_top_k_times_what_the_text_counts() -> None:
    """For the all-to-alls of a layer in the forward and backward pass, section 11.5 of source text D states
    4 B S H (E-1)/E, and sections 12.3 and 12.6 state 4 B S H. The first number is correct if each token is routed to
    one expert; Mixtral, the example in section 12.3, routes each token to two experts and sends twice as much."""
    model = models.MIXTRAL_8X7B
    job = Job(model, 2048, 8, 1, Grid(dp_shard=8, ep=8))
    layers, one = len(model.layers), 2048 * model.d_model * 2 * 7 / 8
    counts = layers * 7 * 8  # all-gather of the experts' loads, 8 bytes each
    assert traffic(job, 0)["ep"] - counts == pytest.approx(2 * 4 * one * layers)


def test_where_tp_belongs() -> None:
    """According to source texts A (section 02) and D (section 9.4), NVLink is fast enough for tensor parallelism, and
    InfiniBand is too slow. For GPT-3, the planner agrees: over NVLink a step is compute-bound, over InfiniBand it is
    network-bound."""
    job = Job(models.GPT3, 2048, 64, 1, Grid(pp=8, tp=8))
    inside = roofline(job, hardware("H100"))[0]
    assert inside.link.name.startswith("nvlink") and inside.regime == "compute"
    machine = hardware("H100")
    apart = Hardware("apart", machine.device, machine.links[1:], machine.efficiency)
    assert roofline(job, apart)[0].regime == "network"
