"""Builds the messages that report how many tokens each expert received, from the (token, expert) pairs of the whole
job. Torch-free."""

import math

import numpy as np
from numpy.typing import NDArray

from agents.protocol import Experts, ExpertShare, LayerLoad, Loads, LoadSummary
from agents.protocol.measurements import TOP_EXPERTS

Load = NDArray[np.int64]
"""[layer, expert]; `dropped` has the pairs over capacity by layer."""


def experts_message(step: int, load: Load, dropped: NDArray[np.int64]) -> Experts:
    """A message with the load of every expert, for each layer that has experts."""
    rows = zip(load.tolist(), dropped.tolist(), strict=True)
    return Experts(
        step,
        [LayerLoad(layer, load, drop) for layer, (load, drop) in enumerate(rows) if any(load)],
    )


def loads_message(step: int, load: Load, dropped: NDArray[np.int64]) -> Loads:
    """Summary statistics of the expert load of each layer."""
    (with_experts,) = load.sum(1).nonzero()
    if not len(with_experts):
        return Loads(step, [])
    load = load[with_experts]
    pairs, experts = load.sum(1), load.shape[1]
    share = load / pairs[:, None]
    logs = np.log(share, where=share > 0, out=np.zeros_like(share))
    entropy = (-(share * logs).sum(1) / math.log(max(2, experts))).clip(0.0, 1.0)
    top = (-load).argsort(1, kind="stable")[:, :TOP_EXPERTS]
    columns = (
        *(with_experts, pairs, share.max(1) * experts, share.std(1) * experts, entropy),
        *((load == 0).sum(1), dropped[with_experts], top, np.take_along_axis(share, top, 1)),
    )
    return Loads(
        step,
        [
            LoadSummary(
                *(layer, pairs, most, cv, entropy),
                [ExpertShare(*one) for one in zip(which, shares, strict=True)],
                *(idle, dropped),
            )
            for layer, pairs, most, cv, entropy, idle, dropped, which, shares in zip(
                *(column.tolist() for column in columns), strict=True
            )
        ],
    )
