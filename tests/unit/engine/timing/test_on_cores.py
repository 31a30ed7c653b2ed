"""Tests of predicted step times on CPU cores: counts of dispatched operations, shared cores, FSDP's collectives."""

from dataclasses import replace

import pytest
import torch

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.sections.knobs import Knobs
from engine.config.sections.model import Model, Moe
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.planner.hardware.description import Device, Efficiency, Hardware, Link, Measurement
from engine.planner.timing.on_cores import (
    AGAIN,
    DENSE,
    EMBEDDING,
    EXPERTS,
    HEAD,
    SHARED,
    unit_exchanges,
)
from engine.planner.timing.predict import predict
from engine.planner.workload.job import Job
from engine.probe.kernels import OperationCount
from tests.ranks.cases.cases import SMALL
from tests.unit.engine.config.test_layout import DEMO

WITHIN = 0.1  # relative tolerance of a count, because releases of torch differ


def counted(layers: int, moe: Moe | None, recompute: str) -> tuple[int, int]:
    """Number of operations that torch dispatches in a forward pass with the loss, and in a backward pass."""
    model = Model(layers=layers, d_model=16, heads=2, seq_len=8, vocab=16, moe=moe)
    meter = Meter(layers, moe.experts if moe else 0)
    tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
    knobs = KnobValues.of(Layout(model=model, knobs=Knobs(recompute=recompute)))  # type: ignore[arg-type]
    stage = Stage(ParameterFactory(1, tp, ep), model, range(layers), knobs, meter)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with OperationCount() as forward:
        loss = cross_entropy(stage(tokens), tokens, tp)
    with OperationCount() as backward:
        loss.backward()  # type: ignore[no-untyped-call]
    return forward.count, backward.count


MOE = Moe(experts=8, top_k=2, d_expert=16)
SHARING = Moe(experts=8, top_k=2, d_expert=16, shared_experts=1)


@pytest.mark.parametrize(
    ("moe", "recompute", "forward", "backward"),
    [
        (None, "none", *DENSE),
        (None, "selective", DENSE[0], DENSE[1] + AGAIN["selective"][0]),
        (None, "full", DENSE[0], DENSE[1] + AGAIN["full"][0]),
        (MOE, "none", *EXPERTS),
        (MOE, "full", EXPERTS[0], EXPERTS[1] + AGAIN["full"][1]),
        (SHARING, "none", EXPERTS[0] + SHARED[0], EXPERTS[1] + SHARED[1]),
    ],
    ids=["dense", "dense selective", "dense full", "experts", "experts full", "shared experts"],
)
def test_a_layer_dispatches_as_many_operations(
    moe: Moe | None, recompute: str, forward: int, backward: int
) -> None:
    one, three = counted(1, moe, recompute), counted(3, moe, recompute)
    assert (three[0] - one[0]) / 2 == pytest.approx(forward, rel=WITHIN)
    assert (three[1] - one[1]) / 2 == pytest.approx(backward, rel=WITHIN)


def test_the_ends_dispatch_as_many_operations() -> None:
    forward, backward = counted(1, None, "none")
    assert forward - DENSE[0] == pytest.approx(EMBEDDING[0] + HEAD[0], rel=WITHIN)
    assert backward - DENSE[1] == pytest.approx(EMBEDDING[1] + HEAD[1], rel=WITHIN)


def machine(cores: int = 2, ranks: int = 2, **efficiency: float) -> Hardware:
    return Hardware(
        "cores",
        Device(1e10, 1e10, {"fp32": 1e11}, "by hand"),
        (Link("machine", None, 5e-4, 1e9, "by hand"),),
        Efficiency(**({"gemm": 1.0, "operation": 1e-5} | efficiency)),  # type: ignore[arg-type]
        Measurement(ranks=ranks, cores=cores, pointwise=1e10),
    )


def job_of(*overrides: str) -> Job:
    return Job.of(load(DEMO, [*SMALL, "model.moe=none", *overrides]))


def test_operations_of_the_host_add_to_the_kernels() -> None:
    job = job_of()
    fast, slow = predict(job, machine(operation=0.0)), predict(job, machine(operation=1e-3))
    layers, m = len(job.model.layers), job.micro_batches
    dispatched = m * (layers * sum(DENSE) + sum(EMBEDDING) + sum(HEAD)) + 10 * (9 * layers + 3)
    assert slow.step_s[1] - fast.step_s[1] == pytest.approx(1e-3 * dispatched)
    assert sum(slow.phases.values()) == pytest.approx(slow.step_s[1])


def test_more_ranks_than_measured_wait_for_a_core() -> None:
    """For 8 data-parallel ranks, the step time predicted from a hardware measurement with 2 ranks is 4 times the step
    time predicted from a measurement with 8 ranks."""
    job = job_of("grid.dp_shard=8", "knobs.micro_batches=1")
    two, eight = (predict(job, machine(ranks=ranks)).step_s[1] for ranks in (2, 8))
    assert two == pytest.approx(4 * eight)


def test_on_shared_cores_a_bubble_is_filled_by_other_ranks() -> None:
    job = job_of("grid.pp=2", "model.layers=4")
    own, shared = predict(job, machine(cores=2)), predict(job, machine(cores=1))
    assert own.phases["bubble"] > 0.1 * own.step_s[1]
    assert shared.phases["bubble"] <= 0.01 * shared.step_s[1]


@pytest.mark.parametrize(
    ("overrides", "dense", "experts", "reductions"),
    [
        (["model.moe=none"], [1] * 4, [], 2),
        (["model.moe=none", "train.zero=1"], [1] * 4, [], 1),
        (["model.moe=none", "train.zero=3"], [4, 4, 2, 4], [], 2),
        ([], [1] * 4, [1] * 2, 2),
        (["grid.pp=2"], [1], [1], 1),
        (["grid.pp=2", "train.zero=3", "model.layers=4"], [3, 3, 1], [3, 3], 1),
    ],
)
def test_units_of_fsdp(overrides: list[str], dense: list[int], experts: list[int], reductions: int) -> None:
    """A model of two layers with two micro-batches: each layer, the experts of each layer, the head and the rest of the
    model are FSDP units."""
    job = Job.of(load(DEMO, [*SMALL, "grid.dp_shard=2", *overrides]))
    assert unit_exchanges(job, 0) == ({"dense": dense, "experts": experts}, reductions)


def test_a_device_of_its_own_is_no_core() -> None:
    """A hardware description that was measured on GPUs has no `cores`, so step times are predicted as for other
    GPUs."""
    own = machine()
    gpus = replace_measured(own, cores=None)
    job = job_of()
    assert predict(job, gpus).step_s != predict(job, own).step_s
    assert predict(job, gpus).phases["compute"] == pytest.approx(
        predict(job, replace_measured(own, gone=True)).phases["compute"]
    )


def replace_measured(hardware: Hardware, cores: int | None = None, gone: bool = False) -> Hardware:
    measured = None if gone else Measurement(ranks=2, cores=cores)
    return Hardware(hardware.name, hardware.device, hardware.links, hardware.efficiency, measured)


def test_recompute_costs_time() -> None:
    job = job_of()
    none, full = (predict(replace(job, recompute=mode), machine()) for mode in ("none", "full"))  # type: ignore[arg-type]
    assert 1.1 < full.step_s[1] / none.step_s[1] < 1.6
