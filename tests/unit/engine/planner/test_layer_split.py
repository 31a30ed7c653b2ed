"""Checks that no other split of the layers into stages has a smaller maximum weight, and that a layer's weight is its
number of multiply-adds."""

from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.sections.model import Model
from engine.config.toml import load
from engine.planner.layer_split import layer_weight, split_layers, stage_weights
from tests.unit.engine.config.test_layout import DEMO

MODEL = load(DEMO).model


def model(**changes: object) -> Model:
    return msgspec.structs.replace(MODEL, **changes)


@pytest.mark.parametrize(
    ("layers", "stages", "vocab", "sizes"),
    [
        (4, 2, 256, [2, 2]),
        (5, 3, 256, [2, 2, 1]),
        (7, 4, 256, [2, 2, 2, 1]),
        (3, 3, 256, [1, 1, 1]),
        (10, 2, 4096, [7, 3]),  # the head weighs as much as four layers
        (9, 2, 256 * 129, [8, 1]),  # the head weighs more than all layers, so the last stage has one layer
    ],
)
def test_layers_and_head_are_split_evenly(layers: int, stages: int, vocab: int, sizes: list[int]) -> None:
    parts = split_layers(model(layers=layers, vocab=vocab), stages)
    assert [n for part in parts for n in part] == list(range(layers))
    assert [len(part) for part in parts] == sizes


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(0, 3), st.integers(256, 20_000))
def test_no_other_split_has_a_smaller_maximum(
    layers: int, stages: int, every: int, dense: int, vocab: int
) -> None:
    stages = min(stages, layers)
    moe = msgspec.structs.replace(MODEL.moe, every=every, dense_layers=dense)
    uneven = model(layers=layers, vocab=vocab, moe=moe, d_ff=37)
    ways = []
    for cuts in combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        weights = stage_weights(uneven, [range(a, b) for a, b in pairwise(edges)])
        ways.append((max(weights), sum(weight**2 for weight in weights)))
    mine = stage_weights(uneven, split_layers(uneven, stages))
    assert max(mine) == pytest.approx(min(ways)[0])
    least = min(squares for heaviest, squares in ways if heaviest <= max(mine) * (1 + 1e-12))
    assert sum(weight**2 for weight in mine) == pytest.approx(least)


def test_the_weight_of_a_layer_is_its_multiply_adds() -> None:
    assert MODEL.moe and layer_weight(MODEL, 0) == (
        # Q and o, k and v, causal scores and weighted sums over 64 tokens.
        2 * 64 * 64 + 2 * 64 * 32 + 64 * 64
        + 64 * 8 + 2 * 3 * 64 * 128  # router, two experts
    )  # fmt: skip
    assert layer_weight(model(moe=None), 0) == 2 * 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 256
