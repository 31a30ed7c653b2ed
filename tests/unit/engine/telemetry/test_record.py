"""Step records of ranks and summaries on rank 0: the statistics of each layer's load balance (such as maximum over mean
and entropy) match the loads of the layer's experts, and the FLOPs of ranks add up."""

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config.toml import from_toml
from engine.planner.hardware.peaks import step_flops
from engine.telemetry.records import StepRecords
from engine.telemetry.step_summary import Collected
from tests.unit.agents.fleet import make_summary


def collected(load: list[list[int]], dropped: list[int]) -> Collected:
    return Collected(make_summary(5), np.array(load), np.array(dropped))


def test_one_layer_by_hand() -> None:
    (layer,) = collected([[0, 0, 0, 0], [6, 0, 2, 0]], [0, 1]).loads().layers
    assert (layer.layer, layer.pairs, layer.idle, layer.dropped) == (1, 8, 2, 1)
    assert layer.max_over_mean == 3.0
    assert layer.cv == pytest.approx(math.sqrt((16 + 4 + 0 + 4) / 4) / 2)
    assert layer.entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert [(top.expert, top.share) for top in layer.top[:2]] == [(0, 0.75), (2, 0.25)]


@given(st.lists(st.lists(st.integers(0, 10**9), min_size=8, max_size=8), min_size=1, max_size=4))
def test_load_summaries_match_the_vectors(load: list[list[int]]) -> None:
    both = collected(load, [0] * len(load))
    vectors, short = both.experts(), both.loads()
    assert [layer.layer for layer in vectors.layers] == [layer.layer for layer in short.layers]
    for vector, layer in zip(vectors.layers, short.layers, strict=True):
        mean = sum(vector.load) / len(vector.load)
        assert layer.max_over_mean == pytest.approx(max(vector.load) / mean)
        assert 0 <= layer.entropy <= 1 and layer.cv >= 0
        assert vector.load[layer.top[0].expert] == max(vector.load)


def test_even_load_has_entropy_one_and_one_expert_alone_none() -> None:
    even, alone = collected([[7] * 8, [56] + [0] * 7], [0, 0]).loads().layers
    assert (even.entropy, even.cv, even.max_over_mean) == (pytest.approx(1.0), 0.0, 1.0)
    assert (alone.entropy, alone.idle, alone.max_over_mean) == (0.0, 7, 8.0)


def test_a_dense_model_has_no_loads() -> None:
    none = collected([[], []], [0, 0])
    assert none.loads().layers == [] and none.experts().layers == []


LAYOUT = """
model = {layers = 4, d_model = 32, heads = 4, kv_heads = 2, seq_len = 16, moe = {experts = 4, top_k = 2, d_expert = 16}}
train = {steps = 1, global_batch = 8}
grid = {pp = 2, dp_shard = 2, tp = 2, ep = 2}
knobs = {micro_batches = 2}
"""


def test_flops_of_the_ranks_add_up_to_the_step() -> None:
    layout = from_toml(LAYOUT)
    model, ranks = layout.model, layout.ranks.world
    pairs = 1000
    asked = 0.0
    for rank in range(ranks):
        pp = rank * 2 // ranks
        world: Any = SimpleNamespace(rank=rank, device=torch.device("cpu"), tp=SimpleNamespace(size=2))
        records = StepRecords(layout, cast(Any, world), [2 * pp, 2 * pp + 1], head=pp == 1)
        asked += records.model_flops(pairs)
    assert asked == pytest.approx(step_flops(model, 8 * model.seq_len, ranks * pairs))
