"""Tests of `engine probe` that start no ranks: line fits, TOML, times from measured collectives, error messages."""

import tomllib
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine.metering.clocks import CLOCKS
from engine.planner.hardware.description import (
    Device,
    Efficiency,
    Hardware,
    Link,
    MeasuredCollective,
    Measurement,
)
from engine.planner.hardware.table import load
from engine.planner.timing.collectives import choose
from engine.planner.timing.measured import share_of_cores
from engine.probe.kernels import TINY, layers, rate_and_half
from engine.probe.line import fit
from engine.probe.toml import to_toml
from tests.unit.engine.config.test_layout import DEMO

SIZES = [2**n for n in range(10, 24, 2)]
latencies = st.floats(1e-6, 1e-2)
slopes = st.floats(1e-12, 1e-8)


def test_the_layers_of_the_probe_are_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, as on a GPU, an operation on tensors of different devices raises an error."""
    monkeypatch.setitem(CLOCKS, "meta", CLOCKS["cpu"])
    layers(TINY, 1, torch.device("meta"))


@given(latencies, slopes)
def test_an_exact_line_is_found(latency: float, slope: float) -> None:
    line = fit([(size, latency + size * slope) for size in SIZES])
    assert line.latency == pytest.approx(latency, rel=1e-6)
    assert line.slope == pytest.approx(slope, rel=1e-4)
    assert line.error < 1e-6


@given(latencies, slopes, st.integers(1, len(SIZES) - 2), st.floats(2, 1000))
def test_one_disturbed_time_does_not_move_the_line(
    latency: float, slope: float, which: int, factor: float
) -> None:
    """The times of the smallest and the largest size are never disturbed, because the fitted latency may depend on the
    smallest size alone, and the slope on the largest alone."""
    points = [(size, latency + size * slope) for size in SIZES]
    points[which] = (points[which][0], points[which][1] * factor)
    line = fit(points)
    for n, (size, _) in enumerate(points):
        if n != which:
            assert line.latency + size * line.slope == pytest.approx(latency + size * slope, rel=0.02)


@given(
    st.lists(st.tuples(st.floats(0, 1e9), st.floats(1e-9, 10)), min_size=1, max_size=8), st.floats(1e-3, 1e3)
)
def test_a_line_is_legal_and_scales_with_the_unit_of_time(
    points: list[tuple[float, float]], unit: float
) -> None:
    line = fit(points)
    assert line.latency >= 0 and line.slope >= 0

    def loss(latency: float, slope: float) -> float:
        return sum(abs(latency + size * slope - seconds) / seconds for size, seconds in points)

    scaled = fit([(size, seconds * unit) for size, seconds in points])
    assert loss(scaled.latency / unit, scaled.slope / unit) == pytest.approx(
        loss(line.latency, line.slope), rel=1e-6, abs=1e-6
    )
    assert loss(line.latency, line.slope) <= loss(points[0][1], 0) + 1e-9


@pytest.mark.parametrize("points", [[], [(1, 0.0)], [(-1, 1.0)]])
def test_a_line_needs_points(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="times above 0"):
        fit(points)


def test_rate_and_half_rows_from_squares() -> None:
    rate, half = 100e9, 50.0
    peak, found = rate_and_half([(n, 2 * n**3 / rate * (1 + 3 * half / n)) for n in (64, 128, 256, 1024)])
    assert (peak, found) == (pytest.approx(rate), pytest.approx(half))


def test_a_peak_is_not_extrapolated_far() -> None:
    """The rate measured at the largest matrix size is half of the extrapolated peak, so the reported peak is limited to
    1.25 times this rate."""
    peak, _ = rate_and_half([(n, 2 * n**3 / 1e11 * (1 + 512 / n)) for n in (64, 128, 256, 512)])
    assert peak == pytest.approx(1.25 * 0.5e11)


def measured(*rows: MeasuredCollective, cores: int | None = 2, ranks: int = 4) -> Hardware:
    return Hardware(
        "own",
        Device(1e9, 1e10, {"fp32": 1e11}, "engine probe"),
        (Link("machine", None, 1e-3, 1e9, "engine probe"),),
        Efficiency(),
        Measurement(ranks=ranks, cores=cores, collectives=rows),
    )


ROWS = (
    MeasuredCollective(
        axis="tp", kind="all_gather", algorithm="direct", ranks=2, latency=4e-4, per_byte=1e-9
    ),
    MeasuredCollective(
        axis="dp", kind="all_gather", algorithm="direct", ranks=2, stride=2, latency=6e-4, per_byte=2e-9
    ),
    MeasuredCollective(
        axis="tp",
        kind="all_reduce",
        algorithm="direct",
        ranks=2,
        latency=5e-4,
        per_byte=1e-9,
        most_bytes=2**19,
    ),
    MeasuredCollective(axis="tp", kind="all_reduce", algorithm="ring", ranks=2, latency=9e-4, per_byte=3e-9),
)


def test_what_probe_writes_is_what_plan_reads(tmp_path: Path) -> None:
    hardware = measured(*ROWS)
    path = tmp_path / "own.toml"
    path.write_text(to_toml(hardware))
    assert load(path) == hardware
    bare = msgspec.structs.replace(hardware, measured=None, name='quote " and \x7f')
    path.write_text(to_toml(bare))
    assert load(path) == bare
    assert tomllib.loads(to_toml(hardware))["links"][0].keys() >= {"latency", "bandwidth"}


@pytest.mark.parametrize(
    ("kind", "size", "ranks", "stride", "seconds", "algorithm"),
    [
        ("all_gather", 1e6, 2, 1, 4e-4 + 1e-3, "direct"),  # as measured
        ("all_gather", 1e6, 2, 2, 6e-4 + 2e-3, "direct"),  # ranks of another axis
        # scaled to 3 messages instead of 1 and to 3/4 of the buffer instead of 1/2
        (
            "all_gather",
            1e6,
            4,
            1,
            3 * 4e-4 + 1e-3 * 1.5,
            "direct",
        ),
        ("all_reduce", 2**19, 2, 1, 5e-4 + 2**19 * 1e-9, "direct"),
        ("all_reduce", 2**20, 2, 1, 9e-4 + 2**20 * 3e-9, "ring"),  # above the limit for direct
    ],
)
def test_a_measured_collective_takes_its_measured_time(
    kind: str, size: float, ranks: int, stride: int, seconds: float, algorithm: str
) -> None:
    assert choose(kind, size, ranks, stride, measured(*ROWS)) == (pytest.approx(seconds), algorithm)


def test_what_was_not_measured_takes_the_link() -> None:
    seconds, _ = choose("all_to_all", 1e6, 2, 1, measured(*ROWS))
    assert seconds == pytest.approx(1e-3 + 0.5e6 / (1e9 * Efficiency().link))


@pytest.mark.parametrize(("ranks", "cores", "share"), [(1, 2, 1), (2, 2, 1), (8, 2, 4), (8, None, 1)])
def test_ranks_share_cores(ranks: int, cores: int | None, share: float) -> None:
    assert share_of_cores(ranks, measured(cores=cores)) == share


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "engine probe needs a layout as first argument, a TOML file such as layouts/demo.toml\n"),
        (["absent.toml"], "cannot read the layout absent.toml: No such file or directory\n"),
        ([str(DEMO), "--wrong"], "engine probe has no option --wrong; see engine probe --help\n"),
        ([str(DEMO), "grid.tp=3"], "legal: "),
        ([str(DEMO), "--out", "/absent/x.toml"], "cannot be written: there is no folder /absent\n"),
        ([str(DEMO), "--out", "/"], "--out / cannot be written: it is a folder\n"),
    ],
)
def test_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["probe", *words])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and sentence in err and err.count("\n") == 1
