"""Predicted step times when the host launches kernels while the device computes, and the kernels that each framework is
assumed to run."""

from dataclasses import replace

import msgspec
import pytest

from engine.config.grid import Grid
from engine.planner.hardware.table import hardware
from engine.planner.timing.release import release
from engine.planner.timing.stage import Seconds
from engine.planner.timing.step import PAUSE, Step
from engine.planner.workload.end_work import embedding_work
from engine.planner.workload.job import Job
from engine.planner.workload.layer_work import layer_work
from engine.planner.workload.operations import Memory
from tests.bench.published import models

A100 = hardware("A100-80")
GPT = models.gpt(4, 1024, 16, 51200, 1024)
JOB = Job(GPT, 1024, 8, 1, Grid(tp=8), fused_attention=False, sequence_parallel=False, zero=0)


def step() -> Step:
    launching = msgspec.structs.replace(A100.efficiency, operation=1.0)
    return Step(JOB, msgspec.structs.replace(A100, efficiency=launching), release("megatron-deepspeed"))


def test_the_device_finishes_a_head_at_the_end_of_a_pass_that_the_host_limits() -> None:
    """The host takes 100 s to launch the kernels of the layers, which need only 1 s of device time. The head then runs
    for 50 s on the device."""
    layers, head = Seconds(compute=1.0, launches=100), Seconds(compute=50.0, launches=1)
    seconds = step()._seconds
    assert seconds([(layers,), (head,)]) == pytest.approx(100 + 50 + PAUSE, rel=0.01)


def test_the_host_runs_ahead_while_the_device_computes_the_head() -> None:
    """The backward pass starts with the head. While the device computes the head, the host launches the layers'
    kernels."""
    layers, head = Seconds(compute=1.0, launches=100), Seconds(compute=50.0, launches=1)
    seconds = step()._seconds([(head,), (layers,)])
    assert 101 <= seconds < 120


def test_a_pass_that_the_device_limits_takes_the_sum_of_its_kernels() -> None:
    blocks = [
        (Seconds(compute=30.0),),
        (Seconds(compute=500.0), Seconds(compute=200.0)),
        (Seconds(compute=70.0),),
    ]
    assert step()._seconds(blocks) == pytest.approx(800)


def kernels(job: Job) -> int:
    work = layer_work(job, job.model.layers[0])
    return sum(isinstance(op, Memory) for op in (*work.forward, *work.backward))


def test_megatron_fuses_the_softmax_only_for_a_multiple_of_four_heads() -> None:
    """Megatron's fused softmax kernel requires that the heads of a rank times the sequences of a micro-batch are a
    multiple of four. With tp 8 a rank has two heads, so for a micro-batch of one sequence the softmax is not fused:
    casts, scaling, mask and softmax run as separate kernels."""
    two_heads, four_heads = kernels(JOB), kernels(replace(JOB, micro_batch=2))
    assert two_heads == four_heads + 2
    assert kernels(replace(JOB, seq_len=4096, micro_batch=2)) == two_heads, "the kernel has up to 2048 keys"
    assert kernels(replace(JOB, fused_attention=True)) < four_heads


def test_the_gradient_of_an_embedding_is_dense_in_megatron() -> None:
    """In Megatron, the backward pass of the embedding moves 12 more bytes per weight than in the engine. Each tp rank
    has an eighth of the 51200 x 1024 weights."""
    moved = [
        sum(op.bytes for op in embedding_work(job).backward if isinstance(op, Memory))
        for job in (JOB, replace(JOB, framework="engine"))
    ]
    assert moved[0] - moved[1] == 12 * 51200 * 1024 / 8
    assert (
        embedding_work(replace(JOB, adapters=True)).backward
        == embedding_work(replace(JOB, framework="engine")).backward
    )
