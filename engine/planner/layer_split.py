"""Splits the layers into pipeline stages of consecutive layers, so that the stages' costs are as equal as possible.

The weight of a layer is the number of multiply-adds per token in its forward; backward takes twice as many in every
layer, so it does not change the split. The embedding is a lookup and costs little. The head costs D V, which can be as
much as several layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from engine.config.layout import Model


def layer_weight(model: Model, layer: int, pairs: int | None = None) -> float:
    """Multiply-adds per token in `layer`: projections, causal attention (over half the sequence on average), and either
    the dense MLP or the shared experts and `pairs` routed experts (None means top_k)."""
    D, heads, kv = model.d_model, model.heads * model.head_dim, model.kv * model.head_dim
    attention = 2 * D * heads + 2 * D * kv + model.seq_len * heads
    if model.moe and model.has_experts(layer):
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if pairs is None else pairs)
        return attention + D * moe.experts + 3 * D * moe.d_expert * visited
    return attention + 3 * D * model.ff


def stage_weights(model: Model, parts: Sequence[range]) -> list[float]:
    """The weight of each stage, including the embedding and the head."""
    weights = _weights(model)
    return [sum(weights[part.start : part.stop]) for part in parts]


def split_layers(model: Model, stages: int) -> list[range]:
    """The layers of each stage, at least one. Minimizes the maximum stage weight, then the sum of squared weights."""
    assert 1 <= stages <= model.layers
    upto = [0.0, *accumulate(_weights(model))]
    heaviest, _ = _best_split(upto, stages, max)
    return _best_split(
        upto, stages, lambda before, weight: before + weight**2 if weight <= heaviest else inf
    )[1]


def _weights(model: Model) -> list[float]:
    weights = [layer_weight(model, layer) for layer in range(model.layers)]
    weights[0] += model.d_model
    weights[-1] += model.d_model * model.vocab
    return weights


def _best_split(
    upto: list[float], stages: int, join: Callable[[float, float], float]
) -> tuple[float, list[range]]:
    """The split with the smallest combined weight of the stages (combined by `join`, such as max), and this weight.
    `upto[n]` is the weight of the first n layers. Dynamic programming: it adds one stage at a time and tries each layer
    as the first layer of the stage."""
    layers = len(upto) - 1
    # [n]: smallest combined weight if the first n layers are on the stages so far.
    best = [join(0.0, weight) for weight in upto]
    begins: list[dict[int, int]] = []
    for stage in range(1, stages):
        row, begin = [inf] * (layers + 1), dict[int, int]()
        for end in range(stage + 1, layers - (stages - stage) + 2):
            row[end], latest = min((join(best[at], upto[end] - upto[at]), -at) for at in range(stage, end))
            begin[end] = -latest
        best = row
        begins.append(begin)
    parts, end = [], layers
    for begin in reversed(begins):
        parts.append(range(begin[end], end))
        end = begin[end]
    return best[layers], [range(end), *reversed(parts)]
