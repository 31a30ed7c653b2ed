"""Compiled functions give equal results for any number of rows; layouts and machines that do not support compilation
are refused."""

import pytest
import torch
from torch import Tensor

from engine.config.checks.legal_values import legal_schedules
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.kernels.compiled import Compiler
from engine.metering.meter import Meter
from engine.model.stage import Stage
from engine.model.swiglu import gated
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.preflight.compiler import compiler_refusal
from tests.unit.engine.config.test_layout import DEMO

ONE = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "model.layers=2", "model.seq_len=24"]


def gradients(layout: Layout, compiled: Compiler) -> dict[str, Tensor]:
    meter = Meter(layout.model.layers, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter), compiled=compiled)
    stage = Stage(weights, layout.model, range(layout.model.layers), KnobValues.of(layout), meter)
    logits = stage(torch.arange(4 * 24).view(4, 24) % 256)
    logits.square().sum().backward()
    grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_compiled_model_is_the_same_model() -> None:
    layout = load(DEMO, [*ONE, "model.moe.every=2", "model.moe.shared_experts=1", "knobs.z_loss_coef=0.1"])
    torch.set_default_dtype(torch.float64)
    try:
        plain, compiled = gradients(layout, Compiler()), gradients(layout, Compiler(on=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert plain.keys() == compiled.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-10, atol=1e-12)


@pytest.mark.timeout(300)
def test_expert_rows_of_any_number_are_compiled_once() -> None:
    run = Compiler(on=True)(gated, any_size=True)
    for rows in (5, 7, 64):
        gate, up = (torch.randn(rows, 16, requires_grad=True) for _ in range(2))
        with torch.compiler.set_stance("default" if rows == 5 else "fail_on_recompile"):
            out = run(gate, up)
            out.sum().backward()
        torch.testing.assert_close(out, gated(gate, up))


def test_split_backward_with_compile_is_refused() -> None:
    whole = ["train.compile=true", "model.layers=4", "schedule.name=interleaved"]
    assert legal_schedules(load(DEMO, whole), 2) == ["interleaved"]
    with pytest.raises(LayoutError, match=r"legal: false, or schedule.name = gpipe, 1f1b, interleaved$"):
        load(DEMO, [*whole, "schedule.name=interleaved_zb"])


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "but no-such-compiler is not found; legal: CXX set to" in (compiler_refusal() or "")
