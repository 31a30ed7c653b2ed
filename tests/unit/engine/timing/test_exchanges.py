"""Tests that the roofline, the predicted step time and the metered bytes count the same collectives."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config.toml import load
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import hardware
from engine.planner.roofline import roofline
from engine.planner.timing.collectives import collective_time, dispatch_time
from engine.planner.timing.pipeline import rank_times
from engine.planner.timing.predict import predict
from engine.planner.timing.release import release
from engine.planner.what_if import assumed_hardware
from engine.planner.workload.communication.exchanges import Exchange, rank_exchanges, sends
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job

LAYOUTS = Path(__file__).parents[4] / "layouts"
SHIPPED = [(str(path), "") for path in sorted(LAYOUTS.rglob("*.toml")) if "[model]" in path.read_text()]
MANY = "grid.dp_shard=1024 train.global_batch=4096"
CHANGED = [
    (str(LAYOUTS / name), words)
    for name, words in (
        ("moe-1b.toml", MANY),
        ("moe-1b.toml", f"{MANY} grid.ep=8 train.zero=3"),
        ("moe-1b.toml", "grid.dp_shard=16 grid.tp=8 grid.ep=8 train.global_batch=64 knobs.recompute=full"),
        ("dense-1b.toml", "grid.dp_shard=16 grid.dp_replicate=2 train.global_batch=128 train.zero=3"),
        ("dense-1b.toml", "grid.dp_shard=4 grid.cp=4 knobs.recompute=selective"),
        ("dense-1b.toml", "grid.dp_shard=4 grid.cp=4 grid.cp_method=ulysses train.precision=fp32"),
        ("dense-1b.toml", "grid.dp_shard=4 grid.pp=4 train.zero=3"),
        ("demo.toml", "train.zero=3 grid.dp_shard=8 train.global_batch=64"),
    )
]
AXES = ("tp", "cp", "ep", "dp", "pp")


def seconds(one: Exchange, machine: Hardware) -> float:
    """The predicted time of one run of an exchange, without overlap."""
    if one.copies > 1:
        return dispatch_time(one.bytes, one.copies, one.ranks, one.stride, machine)
    return collective_time(one.kind, one.bytes, one.ranks, one.stride, machine)


def planned(path: str, words: str) -> tuple[Job, Hardware, str | None]:
    layout = load(path, words.split())
    return Job.of(layout), assumed_hardware(layout) or hardware("H100"), layout.plan.release


@pytest.mark.parametrize(("path", "words"), SHIPPED + CHANGED)
def test_step_and_roofline_take_the_same_time_for_an_axis(path: str, words: str) -> None:
    job, machine, name = planned(path, words)
    found, known = predict(job, machine, name), release(name)
    busy = rank_times(job.schedule, job.grid.pp, job.virtual_stages, found.forward, found.backward)
    slowest = max(range(job.grid.pp), key=busy.__getitem__)
    levels = roofline(job, machine, name, slowest)
    exchanges = rank_exchanges(job, slowest, known.gradient_bytes)
    latency, gamma = sum(link.latency for link in machine.links), 3 / machine.device.memory_bandwidth
    for axis in AXES:
        mine = [one for one in exchanges if one.axis == axis]
        total = sum(one.times * seconds(one, machine) for one in mine)
        by_level = [level.bytes.get(axis, 0.0) / level.bytes_per_s for level in levels]
        # No collective is faster than its slower level, or slower than both levels in turn, with latency and additions.
        assert max(by_level) <= total * (1 + 1e-9), axis
        slack = sum(one.times * (4 * one.ranks * latency + 2 * one.bytes * gamma) for one in mine)
        assert total <= sum(by_level) + slack, axis
        # sends of the busiest rank, and those of other ranks that fill and drain the pipeline
        if axis == "pp":
            most = max(sends(job, pp) for pp in range(job.grid.pp))
            total = (most * job.micro_batches + 2 * (job.grid.pp - 1)) * sum(
                seconds(one, machine) for one in mine
            )
        assert found.phases[axis] / known.factor <= total * (1 + 1e-9), axis


@pytest.mark.parametrize(("path", "words"), [case for case in SHIPPED + CHANGED if "frontier" not in case[0]])
def test_the_engines_collectives_send_what_its_meter_counts(path: str, words: str) -> None:
    """The bytes of the roofline are those of the planned traffic."""
    job, machine, name = planned(path, words)
    for pp in range(job.grid.pp):
        sent = traffic(job, job.grid.rank(pp=pp), gradient_bytes=release(name).gradient_bytes)
        levels = roofline(job, machine, name, pp)
        for axis in AXES:
            counted = sum(level.bytes.get(axis, 0.0) for level in levels)
            assert counted == pytest.approx(sent[axis], rel=1e-6), (axis, pp)


def test_traffic_of_deepseek_v3_counts_multi_token_prediction() -> None:
    """The bytes of the shipped layout on its first pipeline rank, counted by hand. With DualPipeV, this rank has the
    first and the last of 32 stages."""
    job = Job.of(load(str(LAYOUTS / "frontier" / "deepseek-v3.toml"), []))
    assert job.model.mtp_layers == 1 and job.stages_of(0) == [0, 31]
    routed = (
        sum(n >= 3 for stage in (0, 31) for n in job.parts[stage]) + 1
    )  # the first three layers are dense
    rows = (
        4096 * job.micro_batch * 8 * 63 / 64
    )  # of eight experts of a token, those on the 63 other ranks of ep
    sent = traffic(job)
    assert sent["ep"] == pytest.approx(
        job.micro_batches * routed * 2 * 2 * rows * 7168 * 2
    )  # there and back, twice
    without = traffic(replace(job, model=replace(job.model, mtp_layers=0)))
    moe = 256 // 64 * 3 * 7168 * 2048
    mla = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512
    other = mla + 7168 * 256 + 3 * 7168 * 2048 + 2 * 7168 + 2 * 7168**2 + 3 * 7168
    gathered_and_reduced = (2 + 4) * (other * 127 / 128 + moe * 1 / 2)
    assert sent["dp"] - without["dp"] == pytest.approx(gathered_and_reduced, rel=1e-4)
