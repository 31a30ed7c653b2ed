"""Splits the layers into pipeline stages of consecutive layers, so that the stages' costs are as equal as possible.

The cost of a layer is the number of multiply-adds per token in its forward pass. The backward pass needs twice as
many multiply-adds in every layer, so counting them would not change the split. The embedding is a lookup and costs
little. The head costs D V multiply-adds, which can be as many as those of several layers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from engine.config.sections.model import Model
from engine.config.sizes import attention_matrices, attention_width, mean_keys, mlp_matrices

Floats = NDArray[np.float64]


def layer_weight(model: Model, layer: int, pairs: int | None = None) -> float:
    """Multiply-adds per token in `layer`: projections, causal attention over the mean number of keys, and either the
    dense MLP or the router, the shared experts and `pairs` routed experts (None = top_k)."""
    attention = attention_matrices(model) + mean_keys(model.seq_len, model.window) * attention_width(model)
    if model.moe and model.has_experts(layer):
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if pairs is None else pairs)
        return attention + model.d_model * moe.experts + mlp_matrices(model, moe.d_expert) * visited
    return attention + mlp_matrices(model, model.ff)


def stage_weights(model: Model, parts: Sequence[range]) -> list[float]:
    """The weight (relative cost) of each stage, including the embedding and the head."""
    weights = _weights(model)
    return [sum(weights[part.start : part.stop]) for part in parts]


def split_layers(model: Model, stages: int) -> list[range]:
    """The layers of each stage; a stage has at least one layer. Minimises the maximum stage weight, then the sum of
    squared stage weights. All layers of a user-supplied model are assumed to cost the same."""
    assert 1 <= stages <= model.layers
    if model.own:
        return list(_split((1.0,) * model.layers, stages))
    return list(_split(tuple(_weights(model)), stages))


@lru_cache(maxsize=1024)
def _split(weights: tuple[float, ...], stages: int) -> tuple[range, ...]:
    upto = np.array([0.0, *accumulate(weights)])
    stage_weight = upto[:, None] - upto[None, :]  # [end, begin]
    heaviest, _ = _best_split(stage_weight, stages, np.maximum)

    def add_square(before: Floats, weight: Floats) -> Floats:
        return np.where(weight <= heaviest, before + weight**2, inf)

    return tuple(_best_split(stage_weight, stages, add_square)[1])


def _weights(model: Model) -> list[float]:
    weights = [layer_weight(model, layer) for layer in range(model.layers)]
    weights[0] += model.d_model
    head = model.d_model * model.vocab
    joined = 2 * model.d_model**2  # joining state and embedding before each layer of multi-token prediction
    weights[-1] += head + model.mtp_layers * (layer_weight(model, model.layers - 1) + joined + head)
    return weights


def _best_split(
    stage_weight: Floats, stages: int, join: Callable[[Floats, Floats], Floats]
) -> tuple[float, list[range]]:
    """The minimum cost over all splits, and the split with this cost. If a stage of weight `weight` is added to a split
    of cost `cost`, the new cost is `join(cost, weight)`. `stage_weight[end, begin]` is the weight of the layers from
    begin to end. The algorithm is dynamic programming: for one stage after another, it tries every layer as
    the first layer of the stage. If several of these layers give the same minimum cost, the last one is chosen."""
    layers = len(stage_weight) - 1
    # [n]: minimum for the first n layers on the stages so far.
    best = join(np.zeros(layers + 1), stage_weight[:, 0])
    backward = np.tri(layers + 1, dtype=bool)  # only begin <= end, because a stage has at least one layer
    np.fill_diagonal(backward, False)
    begins = []
    for stage in range(1, stages):
        tried = np.where(backward, join(best[None, :], stage_weight), inf)
        tried[:, :stage] = inf  # each earlier stage needs at least one layer
        begin = layers - np.argmin(tried[:, ::-1], axis=1)
        best = tried[np.arange(layers + 1), begin]
        begins.append(begin)
    parts, end = [], layers
    for begin in reversed(begins):
        parts.append(range(int(begin[end]), end))
        end = int(begin[end])
    return float(best[layers]), [range(end), *reversed(parts)]
