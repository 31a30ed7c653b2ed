"""Which layers each stage has: consecutive runs that weigh as equally as whole layers allow.

A layer weighs the multiply-adds of a token in its forward; the backward's are twice those in every part, so they change
nothing. The embedding is a lookup and weighs next to nothing; the head weighs D V, which can be several layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from engine.config.layout import Model


def layer_weight(model: Model, layer: int, pairs: int | None = None) -> float:
    """Multiply-adds of one token in `layer`: projections, causal attention over half the sequence on average, and the
    MLP or the experts it visits, `pairs` of them beside the shared ones; absent = its top_k."""
    D, heads, kv = model.d_model, model.heads * model.head_dim, model.kv * model.head_dim
    attention = 2 * D * heads + 2 * D * kv + model.seq_len * heads
    if model.moe and model.has_experts(layer):
        moe = model.moe
        visited = moe.shared_experts + (moe.top_k if pairs is None else pairs)
        return attention + D * moe.experts + 3 * D * moe.d_expert * visited
    return attention + 3 * D * model.ff


def stage_weights(model: Model, parts: Sequence[range]) -> list[float]:
    """What each stage weighs, the embedding and the head with it."""
    weights = _weights(model)
    return [sum(weights[part.start : part.stop]) for part in parts]


def split_layers(model: Model, stages: int) -> list[range]:
    """Each stage's layers, at least one. The heaviest stage is as light as can be, and of such splits the squared
    weights add up to the least."""
    assert 1 <= stages <= model.layers
    upto = [0.0, *accumulate(_weights(model))]
    heaviest, _ = _cut(upto, stages, max)
    return _cut(upto, stages, lambda before, weight: before + weight**2 if weight <= heaviest else inf)[1]


def _weights(model: Model) -> list[float]:
    weights = [layer_weight(model, layer) for layer in range(model.layers)]
    weights[0] += model.d_model
    weights[-1] += model.d_model * model.vocab
    return weights


def _cut(upto: list[float], stages: int, join: Callable[[float, float], float]) -> tuple[float, list[range]]:
    """The least that `join` of the stages' weights, one after the other, can come to, and the stages of it; `upto[n]`
    is what the first n layers weigh. A stage more at a time, over every place where it may begin."""
    layers = len(upto) - 1
    best = [join(0.0, weight) for weight in upto]  # of the first n layers, on as many stages as gone through
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
