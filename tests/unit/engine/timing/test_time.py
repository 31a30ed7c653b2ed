"""Tests of predicted step times: properties that hold for any job, figures from the source documents, and limits on the
errors for published measurements.

The source documents are listed in test_source_texts_communication.py.
"""

from collections import defaultdict
from dataclasses import replace
from math import isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from engine.config.grid import Grid
from engine.config.refusal import RefusedError
from engine.planner.hardware.efficiency import efficiencies
from engine.planner.hardware.table import hardware
from engine.planner.schedule import ScheduleClock
from engine.planner.timing.pipeline import pipeline_time, simulated
from engine.planner.timing.predict import predict
from engine.planner.timing.release import release, releases
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.end_work import head_work
from engine.planner.workload.flops import step_flops
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import Collective, Gemm, Memory
from engine.planner.workload.transformer import Attention, Experts
from tests.bench.planner.plan import pairs, results, wrong_pairs
from tests.bench.published import models
from tests.bench.published.rows import TABLES, read, rows, split

GPT3 = models.gpt(96, 12288, 96, 51200, 2048)
H100 = hardware("H100")
DENSE = Job(models.LLAMA3_8B, 4096, 64, 1, Grid(dp_shard=8, tp=2), zero=1)
ROUTED = Job(models.MIXTRAL_8X22B, 4096, 64, 1, Grid(dp_shard=16, tp=4, ep=8), etp=1, zero=1)


@pytest.mark.parametrize("job", [DENSE, ROUTED])
def test_phases_add_up_to_the_step_within_the_interval(job: Job) -> None:
    found = predict(job, H100, "bridge-26.02")
    low, mid, high = found.step_s
    assert low < mid < high
    assert isclose(sum(found.phases.values()), mid)
    assert isclose(found.tokens_per_s, job.tokens / mid)
    assert isclose(found.mfu, found.tflops_per_device * 1e12 / H100.device.peak["bf16"])
    assert found.bound_by[0] in found.phases
    assert found.bytes == traffic(job, gradient_bytes=release("bridge-26.02").gradient_bytes)


def test_an_unknown_release_has_the_wider_interval() -> None:
    known, unknown = predict(DENSE, H100, "bridge-26.02").step_s, predict(DENSE, H100).step_s
    assert unknown[2] / unknown[0] > known[2] / known[0]


def test_recompute_costs_at_most_one_more_forward() -> None:
    none, full = (predict(replace(DENSE, recompute=mode), H100).step_s[1] for mode in ("none", "full"))
    assert none < full < 1.5 * none


def test_fp8_is_faster_and_less_than_twice_as_fast() -> None:
    bf16, fp8 = (predict(replace(DENSE, precision=name), H100).step_s[1] for name in ("bf16", "fp8"))
    assert bf16 / 2 < fp8 < bf16


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(RefusedError, match="A100-80 has no matrix products in fp8; legal: bf16, fp32"):
        predict(replace(DENSE, precision="fp8"), hardware("A100-80"))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1024, 4096, 16384]), st.sampled_from([1, 2, 4, 8]))
def test_more_work_never_takes_less_time(micro: int, seq: int, tp: int) -> None:
    job = Job(models.LLAMA3_8B, seq, 64, micro, Grid(dp_shard=8, tp=tp), zero=1)
    step = predict(job, H100).step_s[1]
    assert step < predict(replace(job, seq_len=2 * seq), H100).step_s[1]
    assert step < predict(replace(job, global_batch=128), H100).step_s[1]
    assert step <= predict(job, hardware("H100/roce-100")).step_s[1]


@settings(max_examples=25, deadline=None)
@given(st.floats(1, 4))
def test_imbalance_of_experts_costs_time(imbalance: float) -> None:
    even, uneven = (
        predict(ROUTED, H100).step_s[1],
        predict(replace(ROUTED, imbalance=imbalance), H100).step_s[1],
    )
    assert even <= uneven * (1 + 1e-9)


@pytest.mark.parametrize(("framework", "pairs", "busiest"), [("engine", 1.0, 1.25), ("megatron", 1.5, 1.0)])
def test_the_engine_does_not_pad_experts_to_their_capacity(
    framework: str, pairs: float, busiest: float
) -> None:
    job = Job(models.QWEN3_30B, 4096, 8, 1, capacity_factor=1.5, imbalance=1.25, framework=framework)
    assert (job.pairs_run, job.busiest_rank) == (pairs, busiest)
    dropping = replace(job, capacity_factor=0.8)
    assert (dropping.pairs_run, dropping.busiest_rank) == (0.8, 1.0)


def test_experts_of_few_rows_are_slower_for_the_same_flops() -> None:
    """Routing each token to 16 of 64 experts takes as many FLOPs as routing it to 2 of 8 experts that are 8 times as
    wide, but more time."""
    few, many = (
        replace(ROUTED, model=models.routed(8, 6144, Attention(48, 8, 128), experts, 32768))
        for experts in (Experts(8, 2, 16384), Experts(64, 16, 2048))
    )
    assert step_flops(few) == pytest.approx(step_flops(many), rel=1e-2)
    assert predict(many, H100).phases["compute"] > 1.1 * predict(few, H100).phases["compute"]


def test_a_newer_device_is_faster_where_the_host_is_not_the_limit() -> None:
    assert predict(DENSE, hardware("B200")).step_s[1] < predict(DENSE, H100).step_s[1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 8), (8, 32), (8, 3)])
def test_time_of_the_pipeline_is_that_of_the_simulation_for_balanced_stages(
    name: str, p: int, m: int
) -> None:
    v = 2 if name == "interleaved" else 1
    forward, backward = [1.0] * (p * v), [2.0] * (p * v)
    clock = ScheduleClock(name, p, v, m)
    cost = {"F": 1.0, "B": 2.0}
    window, _ = clock.idle([[cost[act.kind] for act in acts] for acts in clock.acts])
    assert pipeline_time(name, p, v, m, forward, backward) == pytest.approx(window)


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_closed_form_is_near_the_simulation_for_uneven_stages(name: str) -> None:
    p, m, v = 4, 16, 2 if name == "interleaved" else 1
    rng = np.random.default_rng(1)
    for _ in range(20):
        forward = rng.uniform(0.7, 1.3, p * v).tolist()
        backward = [2 * seconds for seconds in forward]
        clock = ScheduleClock(name, p, v, m)
        costs = {"F": forward, "B": backward}
        window, _ = clock.idle([[costs[act.kind][act.stage] for act in acts] for acts in clock.acts])
        assert pipeline_time(name, p, v, m, forward, backward) == pytest.approx(window, rel=0.1)


@pytest.mark.parametrize("name", ["zbv", "dualpipev", "interleaved_zb"])
def test_a_long_schedule_is_extrapolated_exactly_from_short_ones(name: str) -> None:
    forward, backward = [1.0] * 8, [2.0] * 8
    clock = ScheduleClock(name, 4, 2, 48)
    costs = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    window, _ = clock.idle([[costs[act.kind] for act in acts] for acts in clock.acts])
    assert simulated(name, 4, 2, 48, forward, backward) == pytest.approx(window, rel=0.01)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "share"), [(8, 1, 7 / 8), (8, 133, 0.05), (4, 8, 3 / 11)]
)
def test_bubble_of_the_source_texts(stages: int, micro_batches: int, share: float) -> None:
    """The bubble is (p - 1) / (m + p - 1). For a bubble below 5 % with 8 stages, the source documents state 133
    micro-batches. With 133 micro-batches the bubble is exactly 5 %, so 134 are needed."""
    ones = [1.0] * stages
    window = pipeline_time("gpipe", stages, 1, micro_batches, ones, ones)
    assert 1 - micro_batches * 2 / window == pytest.approx(share)


def test_traffic_of_tensor_parallelism_of_a_gpt3_layer() -> None:
    """According to the formula in section 9.5 of the roofline guide (text D in test_source_texts_communication.py),
    4 x 2 (t-1)/t x B S H elements of 2 bytes, tensor parallelism sends 352 MB for a layer. The document says about
    175 MB, which is wrong."""
    job = Job(GPT3, 2048, 1, 1, Grid(tp=8), sequence_parallel=False)
    work = layer_work(job, GPT3.layers[0])
    ops = [op for op in (*work.forward, *work.backward) if isinstance(op, Collective)]
    assert sum(2 * (8 - 1) / 8 * op.bytes for op in ops) == pytest.approx(352e6, rel=1e-3)


def test_the_loss_before_2023_passes_fp32_logits_through_memory_in_each_of_its_kernels() -> None:
    """Counts the bytes that Megatron-LM's megatron/mpu/cross_entropy.py reads and writes per logit."""
    cast, maximum, subtract, exponential, total, divide = (2, 4), (4, 0), (4, 4), (4, 4), (4, 0), (4, 4)
    forward = cast, maximum, subtract, exponential, total, divide
    product, back = (4, 4), (4, 2)
    work = head_work(Job(GPT3, 2048, 8, 1, Grid(tp=8), fused_attention=False))
    logits = 2048 * 51200 / 8
    for kernels, found in ((forward, work.forward), ((product, back), work.backward)):
        assert sum(map(sum, kernels)) * logits in [op.bytes for op in found if isinstance(op, Memory)]


@pytest.mark.parametrize(
    ("parameters", "bytes_each", "seconds"),
    [(340e6, 2, 7e-3), (1.5e9, 2, 30e-3), (7e9, 2, 140e-3), (70e9, 2, 1.4)],
)
def test_data_parallel_all_reduce_of_the_source_texts(
    parameters: float, bytes_each: int, seconds: float
) -> None:
    """Section 7.4 of the roofline guide (text D in test_source_texts_communication.py) lists how long the gradient
    all-reduce of several models takes at 200 GB/s. The guide counts 2 N bytes for an all-reduce of N bytes. In a ring
    of many ranks, each rank sends nearly that many."""
    many = 2 * (1023 / 1024) * parameters * bytes_each / 200e9
    assert many == pytest.approx(seconds, rel=0.05)


def test_fsdp_moves_half_as_much_again_as_ddp() -> None:
    """According to section 8.4 of the roofline guide (text D in test_source_texts_communication.py), FSDP sends 3 N
    bytes and DDP 2 N bytes in a step, where N is the size of the weights. This holds if weights and gradients have the
    same dtype and a step has one micro-batch."""
    base = Job(models.LLAMA3_8B, 1024, 8, 1, Grid(dp_shard=8), precision="fp32", framework="engine")
    ddp, fsdp = (traffic(replace(base, zero=zero))["dp"] for zero in (1, 3))
    assert fsdp / ddp == pytest.approx(1.5, rel=0.1)


def test_layers_that_do_not_divide_leave_room_for_embedding_and_loss() -> None:
    assert split(126, 64) == (1, *(2,) * 62, 1)
    assert split(80, 8) == (10,) * 8


CEILINGS = {  # maximum mean absolute relative error; docs/measurements.md has the measured errors
    ("A100", "dense"): 0.065,
    ("Hopper", "dense"): 0.065,
    ("Hopper", "routed"): 0.105,
    ("Blackwell", "dense"): 0.06,
    ("Blackwell", "routed"): 0.16,
}


def test_published_rows_stay_within_the_recorded_errors() -> None:
    found = results(rows())
    errors = defaultdict(list)
    for result in found:
        errors[result.row.generation, result.row.kind].append(abs(result.error))
    for group, ceiling in CEILINGS.items():
        assert np.mean(errors[group]) < ceiling, group
    assert np.mean([result.held for result in found]) > 0.83
    ordered = pairs(found)
    assert len(wrong_pairs(rows())) == sum(fast.mid >= slow.mid for fast, slow in ordered)
    assert np.mean([fast.mid < slow.mid for fast, slow in ordered]) > 0.92


def test_no_published_row_is_left_out_in_silence() -> None:
    published = rows()
    for file in TABLES.glob("*.csv"):
        mine = [row for row in published if row.source == file.stem]
        assert len(mine) == len(read(file.stem)) and all(row.job or row.note for row in mine), file.stem


def test_every_release_of_a_row_names_its_source() -> None:
    for row in rows():
        assert releases()[row.release].source, row.release


def test_selective_recompute_repeats_the_attention_block_in_the_engine() -> None:
    """The engine recomputes the norm, the query, key and value projections, and attention, but not the output
    projection."""
    engine = Job(models.LLAMA3_8B, 1024, 8, 1, Grid(), framework="engine", recompute="selective")
    megatron = replace(engine, framework="megatron")
    products = [
        [op for op in layer_work(job, models.LLAMA3_8B.layers[0]).core if isinstance(op, Gemm)]
        for job in (engine, megatron)
    ]
    wide = engine.model.d_model + 2 * 1024  # 32 heads of queries, 8 of keys and 8 of values
    assert [(op.n, op.k) for op in products[0]] == [(wide, engine.model.d_model)] and not products[1]


@pytest.mark.parametrize("generation", efficiencies())
@pytest.mark.parametrize("job", [DENSE, ROUTED], ids=["dense", "routed"])
def test_an_unknown_release_never_narrows_the_interval(generation: str, job: Job) -> None:
    """The interval of an unknown release contains that of a known one, relative to the likely time."""
    machine = structs.replace(H100, efficiency=efficiencies()[generation])
    known, unknown = (predict(job, machine, name).step_s for name in ("bridge-26.02", None))
    assert unknown[0] / unknown[1] <= known[0] / known[1] * (1 + 1e-9)
    assert unknown[2] / unknown[1] >= known[2] / known[1] * (1 - 1e-9)
    wide = {
        "dense unknown": (0.99, 1.01),
        "routed unknown": (0.99, 1.01),
        "dense": (0.5, 2.0),
        "routed": (0.5, 2.0),
    }
    own = structs.replace(H100, efficiency=structs.replace(H100.efficiency, spread=wide))
    low, likely, high = predict(job, own).step_s
    assert (low, high) == pytest.approx((likely / 2, likely * 2))
