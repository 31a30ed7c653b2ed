"""Tests the reports of `engine collectives` for given measured times, the files that it writes, and its error messages.
The tests start no ranks."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine.cli.measuring import collectives as command
from engine.collectives.measured import chosen_all_reduces
from engine.config.refusal import RefusedError
from engine.config.toml import load as load_layout
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
from engine.planner.timing.costs import cost
from engine.planner.timing.measured import fastest
from engine.planner.what_if import as_run
from engine.probe.report import ALL, Measured, Settings, Trial, added, report
from engine.probe.toml import to_toml
from tests.unit.engine.config.test_layout import DEMO

SIZES = (1024, 16_384, 2**20, 2**24)
ALPHA, BETA = 40e-6, 2e-9
NAMES = ("naive", "tree", "ring", "doubling", "halving-doubling")
SETTINGS = Settings(8, sizes=SIZES)


def seconds(name: str, size: int, ranks: int = 8) -> float:
    """The time of an algorithm on links with latency ALPHA and bandwidth 1 / BETA."""
    found = cost("all_reduce", name, ranks)
    return found.steps * ALPHA + found.sent * size * BETA


def measured(noise: float = 0.0) -> Measured:
    """Three measured times for each call: the second is longer than the first by the fraction `noise`, and the third is
    shorter by the same fraction."""
    factors = (1.0, 1 + noise, 1 - noise)
    return Measured(
        "gloo",
        2,
        8,
        [
            (Trial("all_reduce", name, size), [factor * seconds(name, size) for factor in factors])
            for name in NAMES
            for size in SIZES
        ],
    )


def probed(*rows: MeasuredCollective) -> Hardware:
    return Hardware(
        "own",
        Device(1e9, 1e10, {"fp32": 1e11}, "engine probe"),
        (Link("machine", None, 1e-3, 1e9, "engine probe"),),
        Efficiency(),
        Measurement(ranks=8, cores=2, collectives=rows),
    )


def test_alpha_and_beta_of_the_links_are_found() -> None:
    found, _ = report(SETTINGS, measured())
    assert {fit.algorithm for fit in found.fits} == {*NAMES, ALL}
    for fit in found.fits:
        assert fit.alpha_s and fit.beta_s
        assert fit.alpha_s == pytest.approx([ALPHA] * 3, rel=1e-6)
        assert fit.beta_s == pytest.approx([BETA] * 3, rel=1e-6)
        assert fit.error < 1e-9


def test_noise_widens_the_interval_around_the_estimate() -> None:
    narrow, wide = (
        next(fit for fit in report(SETTINGS, measured(noise))[0].fits if fit.algorithm == ALL)
        for noise in (0.01, 0.2)
    )
    assert narrow.alpha_s and wide.alpha_s
    for middle, low, high in (narrow.alpha_s, wide.alpha_s):
        assert low < middle < high
    assert wide.alpha_s[2] - wide.alpha_s[1] > 5 * (narrow.alpha_s[2] - narrow.alpha_s[1])


def test_sizes_of_the_crossover_are_those_of_the_formulas() -> None:
    """With eight ranks, doubling takes 3 (alpha + n beta), and halving-doubling takes 6 alpha + 2 x 7/8 n beta. The two
    times are equal at n = 3 alpha / (1.25 beta). A ring sends the same number of bytes as halving-doubling but needs
    more steps, so it is never chosen."""
    bands = [
        (band.algorithm, band.from_bytes, band.to_bytes) for band in report(SETTINGS, measured())[0].chosen
    ]
    crossover = pytest.approx(3 * ALPHA / (1.25 * BETA), rel=1e-3)
    assert bands == [("doubling", 0, crossover), ("halving-doubling", crossover, None)]


lines = st.lists(st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8)), min_size=1, max_size=8)


@given(lines, st.floats(1, 1e9))
def test_the_chosen_algorithm_has_the_fastest_line(given: list[tuple[float, float]], size: float) -> None:
    rows = [
        MeasuredCollective(
            axis="world", kind="all_reduce", algorithm=f"{n}", ranks=2, latency=latency, per_byte=slope
        )
        for n, (latency, slope) in enumerate(given)
    ]
    chosen = next(row for row in fastest(rows) if row.most_bytes is None or size <= row.most_bytes)
    best = min(latency + size * slope for latency, slope in given)
    # Sizes between two whole bytes may fall on the other side of a crossover.
    assert chosen.latency + size * chosen.per_byte <= best + max(slope for _, slope in given)


def test_planner_and_engine_use_the_numbers_that_were_written(tmp_path: Path) -> None:
    """A plan uses the numbers only if `run.collectives` of its layout is set. A second measurement replaces the
    first."""
    torchs = MeasuredCollective(
        axis="tp", kind="all_reduce", algorithm="ring", ranks=8, latency=1.0, per_byte=1e-6
    )
    path = tmp_path / "own.toml"
    hardware = probed(torchs)
    for _ in range(2):
        hardware = added(hardware, *report(SETTINGS, measured()))
        path.write_text(to_toml(hardware))
        assert load(path) == hardware
    assert hardware.measured and len(hardware.measured.algorithms) == len(NAMES)
    plain, chosen = (
        as_run(load_layout(DEMO, words), load(path)) for words in ([], [f"run.collectives={path}"])
    )
    assert plain and chosen
    assert choose("all_reduce", 2**20, 8, 1, plain) == (pytest.approx(1.0 + 2**20 * 1e-6), "ring")
    for size, name in ((1024, "doubling"), (2**24, "halving-doubling")):
        expected = pytest.approx(seconds(name, size), rel=1e-6)
        assert choose("all_reduce", size, 8, 1, chosen) == (expected, name)
    # Four ranks were not measured: the time is computed with the algorithm's steps and bytes for four ranks.
    expected = pytest.approx(seconds("doubling", 1024, 4), rel=1e-6)
    assert choose("all_reduce", 1024, 4, 1, chosen) == (expected, "doubling")
    rows = chosen_all_reduces(path, "gloo")
    assert [row.algorithm for row in rows] == ["doubling", "halving-doubling"]


def hostile(**changed: Any) -> Hardware:
    row = MeasuredCollective(
        axis="world", kind="all_reduce", algorithm="ring", ranks=4, latency=1e-3, per_byte=0.0
    )
    hardware = probed()
    assert hardware.measured
    rows = (msgspec.structs.replace(row, **changed),)
    return msgspec.structs.replace(
        hardware, measured=msgspec.structs.replace(hardware.measured, algorithms=rows)
    )


@pytest.mark.parametrize(
    ("hardware", "sentence"),
    [
        (probed(), "has no measured all-reduce; legal: "),
        (hostile(kind="all_gather"), "has no measured all-reduce; legal: "),
        (hostile(algorithm="butterfly"), "all-reduce butterfly is not known; legal: direct, doubling, "),
        (hostile(algorithm="hierarchical"), "hierarchical over 4 ranks has node = None; legal: a divisor"),
        (
            hostile(algorithm="hierarchical", node=3),
            "hierarchical over 4 ranks has node = 3; legal: a divisor",
        ),
    ],
)
def test_a_file_without_legal_all_reduces_is_refused(
    hardware: Hardware, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(hardware))
    with pytest.raises(RefusedError) as refused:
        chosen_all_reduces(path)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)


def test_a_run_with_a_wrong_file_is_refused_before_it_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(probed()))
    with pytest.raises(SystemExit) as end:
        main(["run", str(DEMO), f"run.collectives={path}", f"run.dir={tmp_path}/runs"])
    out, err = capfd.readouterr()
    assert (end.value.code, out) == (2, "") and err.count("\n") == 1 and "has no measured all-reduce" in err
    assert not (tmp_path / "runs").exists()


def test_numbers_of_another_backend_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(to_toml(hostile()))
    assert chosen_all_reduces(path, "gloo")
    with pytest.raises(RefusedError, match="was measured on gloo, but this run uses nccl"):
        chosen_all_reduces(path, "nccl")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "1"], "--ranks = 1 is not legal; legal: a whole number from 2 to 256\n"),
        (["--ranks", "four"], "--ranks = four is not legal; legal: a whole number from 2 to 256\n"),
        (["--ranks", "6", "--node", "4"], "--node = 4 does not divide --ranks = 6; legal: 1, 2, 3, 6\n"),
        (["--algorithms", "butterfly"], "--algorithms = butterfly is not known; legal: direct, doubling, "),
        (["--algorithms", "hierarchical"], "needs --node, the number of ranks of a node; legal: "),
        (
            ["--kinds", "all-gather", "--algorithms", "tree"],
            "all-gather has none of these; legal: direct, doubling, ",
        ),
        (
            ["--kinds", "gather"],
            "--kinds = gather is not known; legal: all-reduce, reduce-scatter, all-gather",
        ),
        (["--sizes", "0"], "--sizes = 0 is not legal; legal: 1 to 1GiB, "),
        (["--sizes", "-4"], "--sizes"),
        (
            ["--sizes", "1KiB"],
            "--sizes = 1KiB gives one size of 1024 bytes for 4 ranks, but the fit needs two",
        ),
        (["--sizes", "1,8"], "--sizes = 1,8 gives one size of 16 bytes for 4 ranks, but the fit needs two"),
        (["--sizes", "1KiB,4GiB"], "--sizes = 4GiB is not legal; legal: 1 to 1GiB, "),
        (["--sizes", ",".join(map(str, range(1, 14)))], "--sizes has 13 sizes; legal: up to 12\n"),
        (["--into", "absent.toml"], "cannot read the hardware file absent.toml: No such file or directory\n"),
        (["--wrong"], "engine collectives has no option --wrong; see engine collectives --help\n"),
        (
            ["layout.toml"],
            "engine collectives takes no argument layout.toml; see engine collectives --help\n",
        ),
    ],
)
def test_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["collectives", *words])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_the_text_has_times_fits_and_choice_and_marks_what_is_unknown() -> None:
    unknown = [(Trial("all_reduce", "torch", size), [1e-3]) for size in SIZES[1:]]
    times = measured()
    found, _ = report(SETTINGS, Measured("gloo", 2, 8, [*times.batches, *unknown]))
    lines = list(command.text(found, None))
    assert lines[0] == "8 ranks, gloo, fp32, sharing 2 cores"
    torch = [line for line in lines if line.startswith("torch")]
    assert torch[0].split()[1] == "·" and "1,000" in torch[0]  # the time at 1 KiB was not measured
    assert torch[1].count("·") == 2  # torch's algorithm has neither alpha nor beta
    best = next(line for line in lines if line.startswith("doubling"))
    assert best.count("*") == 2  # it is the fastest at 1 KiB and at 16 KiB
    assert lines[-3].split() == ["0", "B", "to", "46.88", "KiB", "doubling"]
