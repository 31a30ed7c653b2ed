"""Tests the fit of the time that an axis's collectives take: known factors are recovered, and factors that the measured
steps do not determine are left out."""

import random

import pytest
from msgspec import structs

from agents.protocol import Traffic
from cockpit.data.store import Store
from cockpit.data.traffic.traffic import by_axis, groups, trend, trend_steps
from cockpit.data.traffic.traffic_fit import Fit, NoFit, Sample, fit, fits
from cockpit.data.traffic.traffic_roof import roof
from tests.screens.fake_run import FakeRun
from tests.unit.agents.fleet import make_hello, make_summary

REST, ALPHA, BETA = 7.0, 0.8, 4e-6  # ms, ms a micro-batch, ms a byte: 250 MB/s


def samples(
    count: int, vary_bytes: bool, vary_starts: bool, seed: int = 1, noise: float = 0.3
) -> list[Sample]:
    rng = random.Random(seed)
    found = []
    for at in range(count):
        size = 5e6 * (1 + 0.4 * rng.random() * vary_bytes)
        starts = 4 if at < count // 2 or not vary_starts else 8
        ms = REST + ALPHA * starts + BETA * size + rng.gauss(0, noise)
        found.append(Sample(size, ms, starts))
    return found


def test_intervals_hold_the_true_factors() -> None:
    """In about 90 % of 100 generated runs, the 90 % interval of each fitted factor contains the factor with which the
    run was generated. The factors are a fixed time, a time per micro-batch and a time per byte."""
    held = {"rest": 0, "alpha": 0, "beta": 0}
    for seed in range(100):
        found = fit(samples(160, True, True, seed))
        assert isinstance(found, Fit) and found.start_ms and found.ms_per_byte
        held["rest"] += abs(found.rest_ms.value - REST) <= found.rest_ms.reach
        held["alpha"] += abs(found.start_ms.value - ALPHA) <= found.start_ms.reach
        held["beta"] += abs(found.ms_per_byte.value - BETA) <= found.ms_per_byte.reach
    assert all(75 <= count <= 99 for count in held.values()), held


def test_what_did_not_vary_is_unknown() -> None:
    only_bytes, only_starts = fit(samples(160, True, False)), fit(samples(160, False, True))
    assert isinstance(only_bytes, Fit) and only_bytes.start_ms is None
    assert only_bytes.ms_per_byte and only_bytes.ms_per_byte.clear
    assert only_bytes.rest_ms.value == pytest.approx(REST + 4 * ALPHA, abs=1), (
        "start-up times are part of the rest"
    )
    assert isinstance(only_starts, Fit) and only_starts.ms_per_byte is None
    assert only_starts.start_ms and only_starts.start_ms.value == pytest.approx(ALPHA, abs=0.1)
    neither = fit(samples(160, False, False))
    assert neither == NoFit("not enough variation: bytes do not vary, micro-batches stay 4")


def test_no_fit_without_information() -> None:
    assert fit(samples(19, True, True)) == NoFit("19 of the 20 steps that a fit needs")
    together = [
        Sample(1e6 * one.micro_batches, one.ms, one.micro_batches) for one in samples(160, False, True)
    ]
    assert fit(together) == NoFit("not enough variation: bytes and micro-batches vary together")
    once = [*samples(60, False, False), Sample(9e6, 30.0, 4)]
    assert fit(once) == NoFit("not enough variation: few steps decide the fit")
    noise = [
        Sample(one.bytes, random.Random(at).uniform(5, 50), 4)
        for at, one in enumerate(samples(80, True, False))
    ]
    found = fit(noise)
    assert isinstance(found, Fit) and found.ms_per_byte and not found.ms_per_byte.clear


def test_outliers_do_not_move_the_fit() -> None:
    clean = samples(160, True, False)
    disturbed = [one._replace(ms=one.ms + 500) if at % 40 == 7 else one for at, one in enumerate(clean)]
    a, b = fit(clean), fit(disturbed)
    assert isinstance(a, Fit) and isinstance(b, Fit) and b.left_out == 4
    assert (
        a.ms_per_byte and b.ms_per_byte and b.ms_per_byte.value == pytest.approx(a.ms_per_byte.value, rel=0.1)
    )


def test_the_fit_of_a_run_is_per_rank() -> None:
    store = Store()
    store.apply([make_hello(rank, 4) for rank in range(4)])
    for step, one in enumerate(samples(160, True, False)):
        comm = {"ep": Traffic(int(4 * one.bytes), one.ms, one.ms), "pp": Traffic(9, 1.0, 1.0)}
        store.apply([structs.replace(make_summary(step), comm=comm, knobs={"micro_batches": 4})])
    found = fits(store, ["ep", "pp"])
    assert isinstance(found["ep"], Fit) and found["ep"].ms_per_byte
    assert found["ep"].ms_per_byte.value == pytest.approx(BETA, rel=0.2)
    assert found["pp"] == NoFit("its time is waiting for other stages")


@pytest.mark.parametrize(("node_ranks", "link", "hosts"), [(None, "nvlink4", 1), (2, "ib-ndr", 2)])
def test_the_roof_is_that_of_the_slowest_link(node_ranks: int | None, link: str, hosts: int) -> None:
    store = Store()
    run = FakeRun(node_ranks=node_ranks)
    store.apply(
        structs.replace(update, device="NVIDIA H100 80GB HBM3")
        if type(update).__name__ == "Hello"
        else update
        for update in run.story(3)
    )
    assert store.summary
    ep = next(row for row in by_axis(store.summary, 8) if row.axis == "ep")
    assert (
        groups(store)["ep"] == (4, hosts)
        and groups(store)["tp"] == (2, 1)
        and groups(store)["pp"] == (2, hosts)
    )
    found = roof(store, ep)
    assert found and found.machine == "H100" and not found.assumed
    sent = ep.traffic.bytes / 8 * (1 if hosts == 1 else 2 / 3)  # two of three peers are on the other node
    assert found.bytes_ms == pytest.approx(1e3 * sent / found.bytes_per_s)
    assert found.link == link


def test_a_trend_keeps_the_highest_and_marks_missing_steps() -> None:
    store = Store()
    store.apply([make_hello(0, 1)])
    for step in [*range(40), *range(48, 100)]:
        ms = 90.0 if step == 57 else 10.0 + step / 100
        store.apply([structs.replace(make_summary(step), comm={"dp": Traffic(5, ms, ms)})])
    assert trend_steps(100, 30) == 4
    values = trend(store, "dp", 30)
    assert len(values) == 25 and values[57 // 4] == 90.0 and values[10:12] == [None, None]
    assert trend(store, "dp", 30, until=50)[-1] == pytest.approx(10.5) and trend(store, "tp", 30)[0] is None
