"""Compares the computed roofline and scaling with results computed by hand, and tests the charts of `engine plan`."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cli.main import main
from engine.cli.planning import chart, plan_charts
from engine.cli.planning.chart import Chart, Line, cells, powers, svg
from engine.config.grid import Grid
from engine.planner.hardware.description import Device, Efficiency, Hardware, Link
from engine.planner.roofline import Level, ddp_ccr, ridge, roof, roofline
from engine.planner.scaling import scaled_job, scaling
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.flops import step_flops
from engine.planner.workload.job import Job
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.counts import published_models as models

NODES = Hardware(
    "nodes of 8",
    Device(80e9, 3e12, {"bf16": 1e15}, "by hand"),
    (Link("inner", 8, 1e-6, 400e9, "by hand"), Link("outer", None, 1e-5, 40e9, "by hand")),
    Efficiency(gemm=0.5, link=0.5),
)
JOB = Job(models.LLAMA2_7B, 2048, 64, 1, Grid(pp=2, tp=4, dp_shard=4), framework="engine")


def level(flops: float, sent: float, messages: float) -> Level:
    return Level(Link("l", None, 1e-5, 1e10, ""), flops, 1e15, 1e10, {"dp": sent}, {"dp": messages})


@pytest.mark.parametrize(
    ("flops", "sent", "messages", "regime", "advice"),
    [
        (1e15, 1e9, 10, "compute", "kernels"),
        (1e15, 0.9e10, 10, "compute", "balanced"),
        (1e15, 1.5e10, 10, "network", "larger batch"),
        (1e15, 1e11, 10, "network", "four times"),
        (1e12, 1e6, 1000, "latency", "fewer and larger"),
    ],
)
def test_what_takes_longest_bounds(
    flops: float, sent: float, messages: float, regime: str, advice: str
) -> None:
    found = level(flops, sent, messages)
    assert found.regime == regime and advice in found.advice
    assert (found.ccr < found.ridge) == (found.seconds["network"] > found.seconds["compute"])


def test_levels_of_a_job_by_hand() -> None:
    inner, outer = roofline(JOB, NODES)
    sent = max((traffic(JOB, rank) for rank in (0, 16)), key=lambda axes: sum(axes.values()))
    assert inner.flops == outer.flops == step_flops(JOB) / 32
    assert (inner.ridge, outer.ridge) == (ridge(5e14, 2e11), ridge(5e14, 2e10)) == (2500, 25_000)
    # A tp group is in one node, a dp group has two ranks in each of two nodes, and ranks of a pp group are 16 apart.
    assert inner.bytes["tp"] == pytest.approx(sent["tp"], rel=1e-3) and "tp" not in outer.bytes
    assert outer.bytes["pp"] == sent["pp"] and "pp" not in inner.bytes
    assert inner.bytes["dp"] == pytest.approx(sent["dp"] * (1 / 2) / (3 / 4), rel=1e-3)
    assert outer.bytes["dp"] == pytest.approx(sent["dp"] * (1 / 2 * 1 / 2) / (3 / 4), rel=1e-3)
    assert sum(inner.messages.values()) > sum(outer.messages.values())


def test_one_rank_sends_nothing() -> None:
    (alone, _) = roofline(replace(JOB, grid=Grid()), NODES)
    assert alone.sent == 0 and alone.regime == "compute" and alone.efficiency == 1


@given(st.floats(1, 1e9), st.floats(1e9, 1e16), st.floats(1e6, 1e13))
def test_a_roof_is_met_at_the_ridge(ccr: float, flops: float, bandwidth: float) -> None:
    star = ridge(flops, bandwidth)
    assert roof(star, flops, bandwidth) == pytest.approx(flops)
    assert roof(ccr, flops, bandwidth) <= flops
    assert (roof(ccr, flops, bandwidth) == flops) == (ccr * bandwidth >= flops)


def test_a_mixture_has_the_ccr_of_its_active_part() -> None:
    assert ddp_ccr(1000, active_share=0.25) == ddp_ccr(1000) / 4


def test_strong_scaling_keeps_the_batch_and_weak_that_of_a_rank() -> None:
    strong, weak = (scaling(JOB, NODES, kind, [32, 64, 128]) for kind in ("strong", "weak"))  # type: ignore[arg-type]
    assert [point.batch for point in strong] == [64, 64, 64]
    assert [point.batch for point in weak] == [64, 128, 256]
    assert strong[0].efficiency == weak[0].efficiency == 1
    efficiencies = [point.efficiency for point in strong]
    assert efficiencies == sorted(efficiencies, reverse=True) and efficiencies[-1] < 0.95
    assert weak[-1].efficiency > strong[-1].efficiency


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        (12, "12 ranks are not a multiple of pp x dp_replicate x cp x tp = 8"),
        (40, "a batch of 64 is not a multiple of dp = 5"),
        (512, "a rank's batch of 1 is too small for the 2 micro-batches of 1f1b"),
    ],
)
def test_what_does_not_scale_says_why(ranks: int, why: str) -> None:
    assert scaled_job(JOB, "strong", ranks) == why


def test_a_micro_batch_shrinks_with_the_batch_of_a_rank() -> None:
    scaled = scaled_job(replace(JOB, micro_batch=8), "strong", 64)
    assert isinstance(scaled, Job) and (scaled.grid.dp, scaled.micro_batch) == (8, 4)


PLAN = ["plan", str(DEMO), "--hardware", "H100"]


@pytest.mark.parametrize("words", [["--roofline"], ["--scaling", "strong"], ["--scaling", "weak"]])
def test_charts_fit_80_columns_and_svg_is_xml(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "chart.svg"
    main([*PLAN, *words, "--svg", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 20 and max(map(len, lines)) <= 80
    root = ET.parse(out).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.tag.endswith("svg") and any("demo" in (text or "") for text in texts)
    for element in root.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 <= float(element.attrib["cx"]) <= 800 and 0 <= float(element.attrib["cy"]) <= 440


def test_without_plotext_there_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_charts, "has_plotext", lambda: False)
    main([*PLAN, "--roofline"])
    text = capsys.readouterr().out
    assert "ridge" in text and "│" not in text


def test_json_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    main([*PLAN, "--roofline", "--json"])
    levels = json.loads(capsys.readouterr().out)["roofline"]
    assert levels[0]["ccr"] == pytest.approx(levels[0]["flops"] / sum(levels[0]["bytes"].values()))
    main([*PLAN, "--scaling", "strong", "--gpus", "8,16,7", "--json"])
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["ranks"] for point in points] == [7, 8, 16]
    assert "not a multiple" in points[0]["refusal"] and points[1]["efficiency"] == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["plan", str(DEMO), "--roofline"], "--roofline needs a machine: give --hardware NAME or FILE"),
        ([*PLAN, "--roofline", "--scaling", "weak"], "legal: one of them"),
        ([*PLAN, "--svg", "x.svg"], "--svg requires --scaling or --roofline"),
        ([*PLAN, "--scaling", "weak", "--gpus", "8,x"], "--gpus 8,x is not legal"),
        ([*PLAN, "--scaling", "weak", "--gpus", "\u0663"], "is not legal"),
        (["simulate", str(DEMO), "--run-dir", ""], "--run-dir: an empty name is not legal"),
        (["simulate", str(DEMO), "--steps", "\u0663"], "--steps"),
        (
            [*PLAN, "--scaling", "strong", "--gpus", "9"],
            "no number of GPUs is legal; 9 ranks are not a multiple",
        ),
        ([*PLAN, "--roofline", "--gpus", "8"], "--roofline does not take --gpus"),
        ([*PLAN, "--roofline", "--svg", "/absent/x.svg"], "--svg /absent/x.svg cannot be written"),
    ],
)
def test_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and sentence in err and err.count("\n") == 1


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-3, 1e9)), min_size=1, max_size=9), st.booleans())
def test_any_chart_is_drawn(points: list[tuple[float, float]], log_y: bool) -> None:
    drawn = Chart("a < b", "x", "y", (Line("line & more", tuple(points), marks=True),), log_y)
    ET.fromstring(svg(drawn))
    assert all(len(row) <= 80 for row in cells(drawn))


def test_powers_are_few() -> None:
    assert powers(0, 3) == [1, 10, 100, 1000]
    assert len(powers(-3, 30)) <= 8 and chart.number(1.5e12) == "1.5T"
