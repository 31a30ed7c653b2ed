"""Tests of the planner's built-in table of machines: data sheet values, names and networks, a user's own file, bad
input, and plans for the slowest and fastest machines that are legal."""

import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from engine.cli.planning.chart import cells, svg
from engine.cli.planning.plan_charts import roofline_chart, roofline_json, scaling_chart, scaling_json
from engine.cli.planning.plan_text import plan_text
from engine.config.toml import load as load_layout
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.peaks import peak_flops
from engine.planner.hardware.table import HardwareError, find_hardware, hardware, load, names, networks
from engine.planner.roofline import roofline
from engine.planner.scaling import scaling
from engine.planner.timing.measured import with_chosen
from engine.planner.what_if import what_if
from tests.unit.engine.config.test_layout import DEMO

OWN = """name = "two boxes"
[device]
memory_bytes = 24e9
memory_bandwidth = 1e12
source = "own"
peak = { bf16 = 165e12 }
[[links]]
name = "pcie"
ranks = 2
latency = 5e-6
bandwidth = 25e9
source = "measured"
[[links]]
name = "lan"
latency = 30e-6
bandwidth = 1.2e9
source = "measured"
"""


@pytest.mark.parametrize(
    ("name", "cuda"),
    [
        ("A100-80", "NVIDIA A100-SXM4-80GB"),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("H200", "NVIDIA H200"),
        ("B200", "NVIDIA B200"),
    ],
)
def test_peaks_are_those_of_the_engine(name: str, cuda: str) -> None:
    for precision in ("bf16", "fp32"):
        assert hardware(name).device.peak[precision] == pytest.approx(peak_flops(cuda, precision))


def test_peaks_are_dense() -> None:
    # The data sheets also give sparse peaks, twice as high: 624 TFLOP/s for A100, 1,979 for H100, 4,500 for B200.
    assert hardware("A100-80").device.peak["bf16"] == 312e12
    assert hardware("H100").device.peak["bf16"] < 1e15
    assert hardware("B200").device.peak["bf16"] == 2250e12
    for name in names():
        peak = hardware(name).device.peak
        assert peak["fp32"] < peak["bf16"] <= peak.get("fp8", peak["bf16"])


def test_all_machines_reach_any_number_of_ranks_and_name_their_sources() -> None:
    for name in names():
        found = hardware(name)
        assert found.links[-1].ranks is None and found.link(10_000) == found.links[-1]
        assert found.device.source and all(link.source for link in found.links)
        inner, outer = found.links[0], found.links[-1]
        assert inner.bandwidth > outer.bandwidth and inner.latency <= outer.latency
    tree = tomllib.loads(resources.files("engine.planner.hardware").joinpath("table.toml").read_text())
    used = {level for machine in tree["machines"].values() for level in machine["links"]}
    assert tree["links"].keys() == used | set(networks())


def test_another_network() -> None:
    slow = hardware("H100/ethernet-100")
    assert slow.device == hardware("H100").device and slow.links[0] == hardware("H100").links[0]
    assert slow.links[-1].name == "ethernet-100" and slow.links[-1].bandwidth < 2e9


def test_a_file_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    found = find_hardware(str(path))
    assert found.name == "two boxes" and [link.ranks for link in found.links] == [2, None]
    assert find_hardware("H100") == hardware("H100")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100", "hardware 'h100' is not known; did you mean H100?; legal: V100, A100-40"),
        ("", "hardware '' is not known; legal: V100"),
        ("H100/fast", "'fast' is not a known network; legal: ib-edr, ib-hdr"),
        ("H100/nvlink4", "'nvlink4' is not a known network"),
        ("H100/", "'' is not a known network"),
    ],
)
def test_unknown_names(name: str, says: str) -> None:
    with pytest.raises(HardwareError) as caught:
        hardware(name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "is not legal: "),
        ('name = "x"', "missing required field `device`"),
        (OWN.replace("24e9", "-1"), "$.device.memory_bytes"),
        (OWN.replace("ranks = 2", "ranks = 1"), "$.links[0].ranks"),
        (OWN.partition("[[links]]\nname = \"lan\"")[0], "no link that joins any number of ranks"),
        (OWN.replace("1e12", "1e-300"), "Expected `float` >= 1.0 - at `$.device.memory_bandwidth`"),
        (OWN + "\n[measured]\nranks = 2\npointwise = 1e-300\n", "measured.pointwise = 1e-300; legal: 0 (the memory"),
        (OWN + "\n[efficiency]\ngem = 0.3\n", "unknown field `gem`"),
        (OWN + "\n[efficiency]\nspread = {dense = [3.0, 1.0]}\n", "legal: the lower end first"),
        (re.sub(r"peak = .*", "peak = {}", OWN), "no rate in device.peak"),
        (OWN.replace("[[links]]", "[links]", 1).partition("[[links]]")[0], "Expected `array`"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(HardwareError) as caught:
        load(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(HardwareError, match="No such file"):
        load(tmp_path / "none.toml")


# ------------------------------------------------------------------------------------- the ends of legal values


def ends(kind: inspect.Type, draw: Random, name: str = "") -> Any:
    """A value of a type: a number is an end of its legal range, or an ordinary one."""
    match kind:
        case inspect.FloatType(ge=low, le=high):
            return draw.choice([low, high, low or 5e-324, min(high, 1e3 * low + 1e-6)])
        case inspect.IntType(ge=low, le=high):
            return draw.choice([low or 1, high or 2**60, 8])
        case inspect.UnionType(types=types):
            return ends(draw.choice(types), draw, name)
        case inspect.StructType(fields=fields):
            chosen = [field for field in fields if field.required or draw.random() < 0.7]
            return {field.encode_name: ends(field.type, draw, field.name) for field in chosen}
        case inspect.DictType(value_type=value):
            keys = (
                ("fp32", "bf16") if name == "peak" else ("dense", "routed", "dense unknown", "routed unknown")
            )
            return {key: ends(value, draw) for key in keys}
        case inspect.VarTupleType(item_type=item):
            return [ends(item, draw, name) for _ in range(draw.randint(1, 3))]
        case inspect.TupleType(item_types=items):
            return sorted(ends(item, draw, name) for item in items)
        case inspect.BoolType():
            return draw.random() < 0.5
        case inspect.StrType():
            return draw.choice(WORDS.get(name, ("x",)))
        case _:
            return None


WORDS = {
    "kind": ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "ring"),
    "algorithm": ("ring", "direct", "doubling", "hierarchical", "gloo"),
    "axis": ("dp", "tp", "ep", "control"),
    "backend": ("gloo", "nccl"),
}
ONE_RANK_LESS = ["grid.dp_replicate=2", "grid.dp_shard=1", "grid.ep=2", "compression.method=int8"]


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(12, 300))]
)
def test_a_plan_is_finite_at_the_ends_of_what_is_legal(seed: int) -> None:
    draw = Random(seed)
    tree = ends(inspect.type_info(Hardware), draw)
    tree["links"][-1]["ranks"] = None
    measured = tree.get("measured") or {}
    if 0 < measured.get("pointwise", 0) < 1:  # `load` refuses it
        measured["pointwise"] = 1.0
    machine = msgspec.convert(tree, Hardware)
    layout = load_layout(
        DEMO, draw.choice(([], ["model.moe=none", "grid.ep=1", "schedule.name=zbv"], ONE_RANK_LESS))
    )
    found = what_if(layout, machine)
    levels = roofline(found.job, machine)
    points = scaling(found.job, machine, draw.choice(("strong", "weak")))
    trees = [found.as_json(), roofline_json(levels), scaling_json("weak", points)]
    assert json.dumps(trees, allow_nan=False)
    assert plan_text("x", found) and with_chosen(machine)
    assert all(
        cells(chart) and "nan" not in svg(chart)
        for chart in (roofline_chart("x", levels), scaling_chart("x", "weak", points))
    )
