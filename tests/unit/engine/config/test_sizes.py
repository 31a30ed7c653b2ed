"""Compares the computed number of parameters with that of modules created on the meta device."""

import pytest
import torch

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.sizes import parameter_count
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from tests.unit.engine.config.test_layout import DEMO

META = torch.device("meta")


def held(layout: Layout) -> int:
    weights = ParameterFactory(1, Axis("tp", None, Meter()), Axis("ep", None, Meter()), device=META)
    stage = Stage(weights, layout.model, range(layout.model.layers), KnobValues.of(layout), Meter())
    return sum(p.numel() for p in stage.parameters())


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.moe=none", "grid.ep=1", "model.d_ff=96", "model.vocab=1024"],
        ["model.moe.every=3", "model.moe.shared_experts=2", "model.moe.balance=bias"],
        ["model.moe.dense_layers=1", "model.moe.every=2", "model.layers=6", "model.moe.balance=aux+bias"],
        ["model.tie_embeddings=true", "grid.pp=1", "model.kv_heads=none"],
    ],
)
def test_the_count_equals_the_modules_parameters(overrides: list[str]) -> None:
    layout = load(DEMO, overrides)
    assert parameter_count(layout.model) == held(layout)


@pytest.mark.parametrize(
    ("name", "whole", "active"),
    [("dense-1b", 1_107_363_840, 1_107_363_840), ("moe-1b", 3_523_545_088, 1_107_625_984)],
)
def test_shipped_layouts_have_the_size_in_their_name(name: str, whole: int, active: int) -> None:
    layout = load(DEMO.with_name(f"{name}.toml"))
    assert parameter_count(layout.model) == held(layout) == whole
    assert parameter_count(layout.model, active=True) == active


def test_active_parameters_are_those_of_one_token() -> None:
    model = load(DEMO).model
    assert parameter_count(model) - parameter_count(model, active=True) == 4 * 6 * 3 * 64 * 128
