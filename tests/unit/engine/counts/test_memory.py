"""Tests of the memory plan: equations of the papers, ZeRO stages, micro-batches in flight, and the summary sentence."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from engine.config.grid import Grid
from engine.config.schedule_traits import SCHEDULES, accepts_micro_batches
from engine.config.toml import load
from engine.planner.hardware.cpu import cpu_cores
from engine.planner.hardware.description import Device, Hardware, Measurement
from engine.planner.memory import in_flight, saved_megatron
from engine.planner.memory.in_flight import counts_in_flight
from engine.planner.memory.peak import LayerBytes, saved_of_stage
from engine.planner.memory.plan import RESERVED, least_bytes, plan_memory
from engine.planner.memory.state import state_of
from engine.planner.schedule import action_order
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import rank_parameters, total
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.counts import published_models as models

GPT3_JOB = Job(models.GPT3, 2048, 64, 1, Grid(), fused_attention=False, dropout=True)


def layer_bytes(job: Job) -> float:
    return sum(entry.bytes for entry in saved_megatron.saved_of_layer(job, job.model.layers[0]))


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(("s", "b"), [(2048, 1), (1024, 4)])
def test_equations_of_korthikanti(t: int, s: int, b: int) -> None:
    """Compares the bytes of a layer with equations 1, 2, 4 and 6 and section 5 of Korthikanti et al. 2022 (arXiv
    2205.05198)."""
    h, a = 12288, 96
    job = replace(GPT3_JOB, seq_len=s, micro_batch=b, grid=Grid(tp=t))
    sbh, scores = s * b * h, 5 * a * s / h
    assert layer_bytes(job) == pytest.approx(sbh * (34 + scores) / t, rel=1e-12)
    without = replace(job, sequence_parallel=False)
    assert layer_bytes(without) == pytest.approx(sbh * (10 + 24 / t + scores / t), rel=1e-12)
    assert layer_bytes(replace(job, recompute="selective")) == pytest.approx(34 * sbh / t, rel=1e-12)
    assert layer_bytes(replace(without, recompute="full")) == 2 * sbh


def test_first_stage_of_korthikanti() -> None:
    """According to section 4.3 of Korthikanti et al. 2022, the first 1F1B stage keeps the activations of p
    micro-batches for its L / p layers. These activations take as much memory as those of one micro-batch for all L
    layers."""
    job = replace(GPT3_JOB, grid=Grid(pp=8, tp=8))
    first = plan_memory(job).ranks[0].activations
    layers = 96 * layer_bytes(job)
    ids_and_dropout = 8 * (2048 * 8 + 2048 * 12288 / 8)
    assert first == pytest.approx(layers + ids_and_dropout, rel=1e-12)


@pytest.mark.parametrize(
    ("zero", "gradients", "expected"),
    [
        # ZeRO (arXiv 1910.02054), figure 1: 7.5 billion parameters on 64 ranks.
        (0, "bf16", 120.0),
        (1, "bf16", 31.4),
        (2, "bf16", 16.6),
        (3, "bf16", 1.9),
        # Megatron-LM's documentation: 18 bytes a parameter, and 6 + 12 / d with the distributed optimizer.
        (0, "fp32", 7.5 * 18),
        (1, "fp32", 7.5 * (6 + 12 / 64)),
    ],
)
def test_zero_stages(zero: int, gradients: str, expected: float) -> None:
    model = models.gpt(36, 4096, 32, 51200, 2048)
    job = Job(model, 2048, 512, 1, Grid(dp_shard=64), zero=zero, gradients=gradients)  # type: ignore[arg-type]
    state = state_of(job, 0, rank_parameters(job, 0))
    per_parameter = (state.parameters + state.gradients + state.optimizer) / total(model)
    assert per_parameter * 7.5 == pytest.approx(expected, abs=0.05)


def test_the_engine_keeps_fp32_shards_and_gathers_what_it_multiplies() -> None:
    model = replace(models.LLAMA2_7B)
    for zero, gathered in ((1, total(model)), (2, total(model))):
        job = Job(model, 4096, 64, 1, Grid(dp_shard=8), zero=zero, framework="engine", master=False)
        state = state_of(job, 0, rank_parameters(job, 0))
        assert state.gathered == 2 * gathered
        assert state.optimizer == pytest.approx(8 * total(model) / 8, rel=1e-3)
    three = replace(job, zero=3)
    state = state_of(three, 0, rank_parameters(three, 0))
    layer = total(model) - 2 * 32000 * 4096 - 4096
    assert state.gathered == 2 * (2 * layer / 32 + 2 * 32000 * 4096 + 4096)


def peaks_by_walking(name: str, rank: int, p: int, v: int, m: int, weights: list[float]) -> float:
    """The peak activation memory of a rank, found by executing a schedule one action after another. Each micro-batch in
    flight on stage n of the pipeline holds `weights[n]` units of memory."""
    now = peak = 0.0
    stages: list[int] = []
    for turn in action_order(name, rank, p, v, m):
        for act in turn:
            if act.stage not in stages:
                stages.append(act.stage)
            weight = weights[act.stage]
            now += {"F": weight, "I": 0.0}.get(act.kind, -weight)
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_in_flight_of_any_stage_sizes(name: str) -> None:
    checked = 0
    for p, v in ((2, 2), (3, 2), (4, 3), (5, 2)):
        v = SCHEDULES[name].virtual_stages or v
        for m in range(1, 42):
            if not accepts_micro_batches(name, p, v, m):
                continue
            weights = [1 + (7 * stage % 5) for stage in range(p * v)]
            for rank in range(p):
                job = Job(models.LLAMA2_7B, 64, m, 1, Grid(pp=p), schedule=name, virtual_stages=v)
                stages = sorted(job.stages_of(rank))
                counts = counts_in_flight(name, rank, p, v, m)
                closed = max(
                    sum(weights[s] * n for s, n in zip(stages, each, strict=True)) for each in counts
                )
                assert closed == peaks_by_walking(name, rank, p, v, m, weights)
                checked += 1
    assert checked > 100


def test_many_micro_batches_are_counted_on_few() -> None:
    in_flight._highest.cache_clear()
    for name in SCHEDULES:
        if name != "gpipe":
            assert in_flight._few(name, 16, 2, 4096) <= 64
    assert counts_in_flight("1f1b", 3, 16, 1, 4096) == ((13,),)
    assert counts_in_flight("gpipe", 3, 16, 1, 4096) == ((4096,),)


def test_imbalance_fills_the_busiest_rank_and_capacity_bounds_it() -> None:
    job = Job(models.MIXTRAL_8X7B, 4096, 64, 1, Grid(dp_shard=8, ep=8), zero=1)
    even, uneven = (saved_of_stage(LayerBytes(replace(job, imbalance=x)), 0)["moe"] for x in (1.0, 2.0))
    assert 1.9 < uneven / even < 2.0
    bounded = saved_of_stage(LayerBytes(replace(job, imbalance=2.0, capacity_factor=1.25)), 0)["moe"]
    assert even < bounded < uneven
    assert (
        saved_of_stage(LayerBytes(replace(job, imbalance=2.0)), 0)["attention"]
        == saved_of_stage(LayerBytes(job), 0)["attention"]
    )


def test_what_the_plan_says() -> None:
    job = Job(models.LLAMA2_70B, 4096, 512, 1, Grid(pp=2, dp_shard=8, tp=8), zero=1)
    plan = plan_memory(job)
    worst = plan.ranks[plan.worst_rank]
    assert plan.worst_rank == 0 and plan.peak == worst.total == sum(worst.components().values())
    assert plan.fits(plan.peak) and not plan.fits(plan.peak - 1)
    said = plan.sentence(40 * 2**30)
    assert said == (
        f"does not fit: {plan.peak / 2**30:,.0f} GiB of 40, pipeline rank 0, "
        f"{worst.largest} {getattr(worst, worst.largest) / 2**30:,.0f}"
    )
    assert plan.sentence(1e12).startswith("fits: ")


def test_a_device_reserves_a_share_for_libraries() -> None:
    device = Device(80e9, 3.35e12, {"bf16": 989e12}, "a data sheet")
    job = Job(models.LLAMA2_7B, 4096, 64, 1, Grid(dp_shard=8), zero=3)
    with_device = plan_memory(job, Hardware("h100", device, ()))
    assert with_device.peak - plan_memory(job).peak == pytest.approx(RESERVED * 80e9)


def test_context_and_sequence_parallelism_divide_what_is_kept() -> None:
    job = Job(models.LLAMA2_7B, 8192, 64, 1, Grid(), recompute="full")
    whole = saved_of_stage(LayerBytes(job), 0)["input"]
    for grid in (Grid(cp=4), Grid(tp=4), Grid(cp=2, tp=2)):
        part = saved_of_stage(LayerBytes(replace(job, grid=grid)), 0)["input"]
        ids = 8192 * 8  # token ids, which tp does not divide
        assert part == pytest.approx((whole - ids) / 4 + ids / grid.cp, rel=1e-12)


def test_what_all_ranks_hold_at_least() -> None:
    """All ranks together hold at least one copy of the fp32 weights, the gradients and the two Adam moments. Below ZeRO
    stage 3, each rank also holds a full copy of the weights; below stage 2, it holds all gradients instead of a
    shard."""
    layout = load(DEMO, ["grid.pp=1", "grid.tp=1", "grid.ep=1", "grid.dp_shard=2", "train.zero=3"])
    job = Job.of(layout)
    size, tables = total(job.model), 2 * 4 * 2 * 64 * 16 * 4
    root = (2 * 256 + 1) * 64  # embedding, head and last norm remain gathered
    assert least_bytes(job) == 16 * size + tables + 2 * 4 * root
    assert least_bytes(replace(job, zero=2)) == 16 * size + tables + 2 * 4 * size
    assert least_bytes(replace(job, zero=1)) == 12 * size + tables + 2 * 8 * size
    assert least_bytes(replace(job, zero=1, micro_batch=16)) == 16 * size + tables


def test_a_machine_measured_with_gloo_has_its_buffers_and_no_device_reserve() -> None:
    """`engine plan --hardware FILE` plans for a machine that trains on CPUs, as described by `engine probe`."""
    job = Job.of(load(DEMO, ["grid.pp=1", "grid.dp_shard=4", "grid.ep=1", "train.zero=3"]))
    assert plan_memory(job, cpu_cores(2)) == plan_memory(job, gloo=True)
    assert plan_memory(job, gloo=True).peak > plan_memory(job).peak
    nccl = replace_struct(cpu_cores(2), measured=Measurement(ranks=8, backend="nccl"))
    assert plan_memory(job, nccl).ranks[0].framework == RESERVED * nccl.device.memory_bytes
