"""Tests of parameter counts against published totals and the engine's own count, and of how the parameters are divided
among ranks."""

from dataclasses import replace

import pytest

from engine.config.grid import Grid
from engine.config.sizes import parameter_count
from engine.config.toml import load
from engine.planner.workload.job import Job
from engine.planner.workload.parameters import (
    active,
    by_part,
    layer_parameters,
    rank_parameters,
    total,
)
from engine.planner.workload.transformer import Attention, Experts, Layer, StateSpace, Transformer
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.counts import published_models as models


@pytest.mark.parametrize(
    ("model", "billions", "active_billions"),
    [
        (models.GPT3, 174.6, 174.6),
        (models.LLAMA2_7B, 6.738, 6.738),
        (models.LLAMA2_70B, 68.98, 68.98),
        (models.LLAMA3_405B, 405.85, 405.85),
        (models.MIXTRAL_8X7B, 46.70, 12.88),
        (models.MIXTRAL_8X22B, 140.63, 39.16),
        (models.DEEPSEEK_V2, 235.74, 21.38),
        (models.DEEPSEEK_V3, 671.03, 37.55),
        (models.QWEN3_235B, 235.09, 22.19),
        (models.KIMI_K2, 1026.4, 32.86),  # table 2 of the paper rounds to 1,040 and 32.6
    ],
)
def test_published_totals(model: Transformer, billions: float, active_billions: float) -> None:
    assert total(model) / 1e9 == pytest.approx(billions, rel=3e-4)
    assert active(model) / 1e9 == pytest.approx(active_billions, rel=3e-4)


def test_multi_token_prediction_counts_apart() -> None:
    # The published size of the module, 14 billion, includes the shared embedding and head of 0.93 billion each.
    extra = total(models.DEEPSEEK_V3, mtp=True) - total(models.DEEPSEEK_V3)
    assert extra / 1e9 == pytest.approx(11.61, abs=0.01)
    assert (extra + 2 * 129280 * 7168) / 1e9 == pytest.approx(13.5, abs=0.05)


LAYOUTS = [
    ("demo", []),
    ("demo", ["model.moe=none", "grid.ep=1", "model.d_ff=96", "model.vocab=1024"]),
    ("demo", ["model.moe.every=3", "model.moe.shared_experts=2", "model.moe.balance=bias"]),
    ("demo", ["model.tie_embeddings=true", "grid.pp=1", "model.kv_heads=none"]),
    ("dense-1b", []),
    ("moe-1b", []),
    ("deepseek-mini", []),
]


@pytest.mark.parametrize(("name", "overrides"), LAYOUTS)
def test_as_the_engine_counts(name: str, overrides: list[str]) -> None:
    model = load(DEMO.with_name(f"{name}.toml"), overrides).model
    assert total(Transformer.of(model)) == parameter_count(model)
    assert active(Transformer.of(model)) == parameter_count(model, active=True)


def test_parts_add_up() -> None:
    parts = by_part(models.DEEPSEEK_V3)
    assert sum(parts.values()) == total(models.DEEPSEEK_V3)
    assert parts["experts"] == 58 * 256 * 3 * 7168 * 2048
    assert parts["shared"] == 58 * 3 * 7168 * 2048
    assert parts["router"] == 58 * 256 * 7168
    assert parts["embedding"] == parts["head"] == 129280 * 7168


def test_a_state_space_layer() -> None:
    # mamba2-2.7b: D 2560, 80 heads of 64, one group, state 128, convolution over 4 tokens, one norm before the mixer.
    layer = Layer(StateSpace(80, 64, 1, 128), None)
    model = Transformer(2560, 50288, (layer,) * 64, tied=True)
    inner, BC = 5120, 256
    expected = 2560 * (2 * inner + BC + 80) + (inner + BC) * 5 + 3 * 80 + inner + inner * 2560 + 2560
    assert sum(layer_parameters(model, layer).values()) == expected
    assert total(model) == 64 * expected + 50288 * 2560 + 2560  # 2.70 billion
    assert total(model) / 1e9 == pytest.approx(2.70, abs=0.005)


def test_a_latent_layer_projects_routed_tokens_only() -> None:
    attention = Attention(8, 2, 16)
    plain = Layer(attention, Experts(16, 4, 32, shared_hidden=64, gated=False))
    latent = Layer(attention, Experts(16, 4, 32, shared_hidden=64, gated=False, latent=64))
    model = Transformer(128, 256, (plain, latent))
    before, after = layer_parameters(model, plain), layer_parameters(model, latent)
    assert after["experts"] == before["experts"] // 2 == 16 * 2 * 64 * 32
    assert after["latent"] == 2 * 128 * 64
    assert after["router"] == before["router"] and after["shared"] == before["shared"] == 2 * 128 * 64


def test_ranks_hold_the_whole_model_between_them() -> None:
    model = replace(models.DEEPSEEK_V3, mtp_layers=0)
    job = Job(model, 4096, 4096, 1, Grid(pp=4, dp_shard=16, tp=4, ep=8), etp=2)
    replicated = 61 * 2 * 7168 + 61 * (1536 + 512) + 61 * 7168 * (1536 + 512 + 64) + 58 * 256 * 7168 + 7168
    held = [rank_parameters(job, pp) for pp in range(4)]
    assert sum(h.dense for h in held) * 4 + sum(h.experts for h in held) * 16 == total(model) + 3 * replicated
    # ZeRO shards dense weights over dp_shard, and an expert over the ranks that hold the same part of it.
    assert job.efsdp == 16 * 4 // 16
    for h in held:
        assert h.experts_shard * 4 == h.experts
        assert 0 <= h.dense_shard * 16 - h.dense < 16 * 20 * 20


def test_more_ranks_than_key_heads_hold_copies() -> None:
    layer = Layer(Attention(16, 2, 8), None)
    model = Transformer(128, 256, (layer,))
    one, many = (rank_parameters(Job(model, 64, 8, 1, Grid(tp=tp)), 0).dense for tp in (2, 8))
    norm_and_last = 2 * 128
    assert one - norm_and_last == (2 * 128 * 128 + 2 * 16 * 128 + 2 * 256 * 128) // 2
    assert many - norm_and_last == (2 * 128 * 128 + 2 * 256 * 128) // 8 + 2 * 8 * 128


def test_a_tied_head_on_another_rank_is_a_copy() -> None:
    model = replace(models.LLAMA2_7B, tied=True)
    job = Job(model, 4096, 64, 1, Grid(pp=2))
    assert sum(rank_parameters(job, pp).whole for pp in range(2)) == total(model) + 32000 * 4096
    v = replace(job, schedule="zbv", virtual_stages=2)
    assert sum(rank_parameters(v, pp).whole for pp in range(2)) == total(model)
