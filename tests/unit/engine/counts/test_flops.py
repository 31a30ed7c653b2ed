"""Tests of the FLOPs of a step against the formulas of papers and against the engine's own count."""

from dataclasses import replace

import pytest

from engine.config.grid import Grid
from engine.config.toml import load
from engine.planner.hardware import peaks
from engine.planner.workload.flops import (
    hardware_flops,
    layer_flops,
    mean_keys,
    step_flops,
    token_flops,
)
from engine.planner.workload.job import Job
from engine.planner.workload.transformer import Attention, Dense, Layer, StateSpace, Transformer
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.counts import published_models as models
from tests.unit.engine.counts.test_parameters import LAYOUTS


@pytest.mark.parametrize(("name", "overrides"), LAYOUTS)
def test_as_the_engine_counts_for_its_mfu(name: str, overrides: list[str]) -> None:
    layout = load(DEMO.with_name(f"{name}.toml"), overrides)
    job = Job.of(layout)
    routed = len(layout.model.layers_with_experts) * layout.model.moe.top_k if layout.model.moe else 0
    assert step_flops(job) == pytest.approx(
        peaks.step_flops(layout.model, job.tokens, job.tokens * routed), rel=1e-12
    )


def gpt_job(layers: int, d_model: int, heads: int, batch: int) -> Job:
    return Job(models.gpt(layers, d_model, heads, 51200, 2048), 2048, batch, 1, Grid())


@pytest.mark.parametrize(
    ("layers", "d_model", "heads", "batch"), [(24, 2304, 24, 512), (105, 20480, 128, 280)]
)
def test_formulas_for_gpt(layers: int, d_model: int, heads: int, batch: int) -> None:
    """Compares the FLOPs with Narayanan et al. 2021, equation 3, and Korthikanti et al. 2022, appendix A, equations
    7-9. Both papers count all keys of a query instead of only the half that the causal mask leaves visible."""
    job = gpt_job(layers, d_model, heads, batch)
    s, V, each = 2048, 51200, batch * 2048 * layers * d_model**2
    model = 72 * each * (1 + s / (6 * d_model) + V / (12 * layers * d_model))
    full = 96 * each * (1 + s / (6 * d_model) + V / (16 * layers * d_model))
    selective = 72 * each * (1 + s / (6 * d_model) + V / (12 * layers * d_model)) + each * 4 * s / d_model
    assert step_flops(job, causal=False) == pytest.approx(model, rel=1e-12)
    assert hardware_flops(replace(job, recompute="full"), causal=False) == pytest.approx(full, rel=1e-12)
    assert hardware_flops(replace(job, recompute="selective"), causal=False) == pytest.approx(
        selective, rel=1e-12
    )
    assert hardware_flops(job, causal=False) == step_flops(job, causal=False)


def test_published_flops_of_deepseek_v3() -> None:
    """Training DeepSeek-V3 takes 250 GFLOPs per token at a sequence length of 4096 (arXiv 2505.09343, table 2)."""
    assert token_flops(replace(models.DEEPSEEK_V3, mtp_layers=0), 4096) / 1e9 == pytest.approx(250, rel=0.02)


def test_published_flops_of_llama_405b() -> None:
    """Training takes 2448 GFLOPs per token for LLaMA-405B, and 155 for DeepSeek-V2 (arXiv 2505.09343, table 2)."""
    assert token_flops(models.LLAMA3_405B, 4096) / 1e9 == pytest.approx(2448, rel=0.02)
    assert token_flops(models.DEEPSEEK_V2, 4096) / 1e9 == pytest.approx(155, rel=0.05)


def test_keys_that_a_query_sees() -> None:
    for seq_len, window in ((16, None), (16, 4), (16, 16), (16, 99)):
        exact = sum(min(q + 0.5, window or seq_len) for q in range(seq_len)) / seq_len
        assert mean_keys(seq_len, window) == pytest.approx(exact, abs=0.02 * seq_len)
    assert mean_keys(4096) == 2048 and mean_keys(4096, causal=False) == 4096
    assert mean_keys(4096, 1024) == 1024 * (1 - 1 / 8)


def test_a_state_space_layer_grows_with_the_sequence_only_once() -> None:
    mamba = Layer(StateSpace(80, 64, 1, 128), None)
    attention = Layer(Attention(32, 32, 80), Dense(64))
    model = Transformer(2560, 256, (mamba, attention))
    assert layer_flops(model, mamba, 1024) == layer_flops(model, mamba, 65536)
    assert layer_flops(model, attention, 65536) > 2 * layer_flops(model, attention, 1024)
    scan = 7 * 5120 * 128
    assert layer_flops(model, mamba, 1024) == 2 * (2560 * (2 * 5120 + 256 + 80) + 5120 * 2560) + scan


def test_the_engine_recomputes_the_whole_attention_block() -> None:
    layout = load(DEMO, ["knobs.recompute=selective"])
    job = Job.of(layout)
    model = layout.model
    attention = 2 * (2 * model.d_model**2 + 2 * model.d_model * model.kv * model.head_width)
    scores = 2 * model.seq_len * model.d_model
    again = job.tokens * model.layers * (attention + scores)
    assert hardware_flops(job) - step_flops(job) == again
    assert (
        hardware_flops(replace(job, framework="megatron")) - step_flops(job)
        == job.tokens * model.layers * scores
    )
