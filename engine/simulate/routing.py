"""Simulated routing: which experts are popular, how balancing evens out their popularity, and how many token-expert
pairs exceed the capacity and are dropped.

Routing is drawn from a statistical model. The popularity of an expert is a log-normal weight that drifts at random. The
layout's balancing methods pull each expert's popularity towards an equal share, each at a rate proportional to the knob
of the method (an Ornstein-Uhlenbeck process). Counts of token-expert pairs are multinomial, so every layer has exactly
tokens x top_k pairs.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.sections.model import Moe
from engine.config.sizes import expert_capacity
from engine.planner.expert_placement import Map
from engine.simulate.scenario import Collapse, Scenario, Skew

START = 0.35  # standard deviation of the logarithms of popularity at the first step
DRIFT = 0.03  # standard deviation of the random change of these logarithms in a step
FORGETS = 0.004  # share of the imbalance that disappears in a step without any balancing
AUX_PULLS = 5.0  # share of the imbalance that a unit of aux_loss_coef removes in a step
BIAS_PULLS = 40.0  # share of the imbalance that a unit of bias_rate removes in a step
Z_CALMS = 20.0  # z_loss_coef reduces logits and therefore the drift: DRIFT / (1 + Z_CALMS z_loss_coef)
MOST_PULL = 0.5
UNEVEN = 0.25  # standard deviation over mean of an expert's token-expert pairs per sequence, beyond chance

_Z = np.linspace(-8.0, 8.0, 1601)
_CUMULATIVE = np.array([0.5 * (1.0 + math.erf(z / math.sqrt(2.0))) for z in _Z])
_EXCESS = np.exp(-(_Z**2) / 2) / math.sqrt(2 * math.pi) - _Z * (1.0 - _CUMULATIVE)
"""E[max(0, X - z)] of a standard normal X."""


@dataclass(frozen=True)
class Routed:
    """The results of routing in one step, over all ranks and by layer. The values of layers without experts are
    zero."""

    load: NDArray[np.int64]  # [layer, expert] (token, expert) pairs before capacity drops some
    dropped: NDArray[np.int64]  # [layer]
    kept: NDArray[np.float64]  # [layer, expert] share of the layer's pairs that the expert processes


class Router:
    """Simulates the routers of all layers with experts. Call `route` once per step."""

    def __init__(self, layout: Layout, moe: Moe, scenario: Scenario, seed: int):
        self._layout, self._moe, self._scenario, self._seed = layout, moe, scenario, seed
        model = layout.model
        self._layers = [layer for layer in range(model.prediction_layers.stop) if model.has_experts(layer)]
        self.placement: dict[int, Map] = {layer: list(range(moe.experts)) for layer in self._layers}
        rng = np.random.default_rng([seed, 2])
        shape = len(self._layers), moe.experts
        self._popularity = START * rng.standard_normal(shape)
        self._favoured = rng.standard_normal(shape)  # the experts that events of kind skew make popular
        self._order = rng.permuted(np.tile(np.arange(moe.experts), (len(self._layers), 1)), axis=1)

    def route(self, step: int, values: KnobValues) -> Routed:
        """The routing of a step under the knob values in force."""
        layout, moe = self._layout, self._moe
        tokens = layout.train.global_batch * layout.model.seq_len
        rng = np.random.default_rng([self._seed, 3, step])
        if moe.router == "expert_choice":
            limit = self._capacity(values.capacity_factor or 1.0)
            return self._even(layout.train.global_batch * moe.experts * limit)
        self._drift(rng, values)
        shares = self._shares(step)
        counts = rng.multinomial(tokens * moe.top_k, shares)
        dropped = self._dropped(shares, counts, values.capacity_factor)
        kept = counts - dropped
        return self._over_all_layers(counts, dropped.sum(1), kept / counts.sum(1, keepdims=True))

    def _drift(self, rng: np.random.Generator, values: KnobValues) -> None:
        pull = FORGETS
        if "aux" in self._moe.balances:
            pull += AUX_PULLS * values.aux_loss_coef
        if "bias" in self._moe.balances:
            pull += BIAS_PULLS * values.bias_rate
        drift = DRIFT / (1.0 + Z_CALMS * values.z_loss_coef)
        self._popularity *= 1.0 - min(MOST_PULL, pull)
        self._popularity += drift * rng.standard_normal(self._popularity.shape)

    def _shares(self, step: int) -> NDArray[np.float64]:
        """[layer, expert]: the expected share of the layer's routing assignments (top_k for each token) that go to the
        expert."""
        logits = self._popularity.copy()
        for event in self._scenario.events:
            if isinstance(event, Skew) and event.in_force(step):
                logits += event.strength * self._favoured
        weights = np.exp(logits - logits.max(1, keepdims=True))
        shares: NDArray[np.float64] = weights / weights.sum(1, keepdims=True)
        for event in self._scenario.events:
            if isinstance(event, Collapse) and event.in_force(step):
                self._collapse(shares, event, step)
        # A token has top_k different experts, so one expert has at most 1 / top_k of the pairs.
        for _ in range(4):
            np.minimum(shares, 1.0 / self._moe.top_k, out=shares)
            shares /= shares.sum(1, keepdims=True)
        return shares

    def _collapse(self, shares: NDArray[np.float64], event: Collapse, step: int) -> None:
        share = event.share * min(1.0, (step - event.step + 1) / event.ramp)
        rows = [n for n, layer in enumerate(self._layers) if event.layer in (None, layer)]
        for n in rows:
            shares[n] *= 1.0 - share
            shares[n, self._order[n, : self._moe.top_k]] += share / self._moe.top_k

    def _dropped(
        self, shares: NDArray[np.float64], counts: NDArray[np.int64], factor: float | None
    ) -> NDArray[np.int64]:
        """Number of token-expert pairs beyond the capacity: from each sequence, an expert takes at most `factor` times
        an equal share of the sequence's pairs. The number of pairs that an expert receives from one sequence is assumed
        to be normally distributed. Its variance is the sum of a binomial variance, for random choices, and a variance
        between sequences (`UNEVEN`)."""
        if factor is None:
            return np.zeros_like(counts)
        pairs = self._layout.model.seq_len * self._moe.top_k
        limit = self._capacity(factor)
        mean = shares * pairs
        deviation = np.sqrt(mean * (1.0 - shares) + (UNEVEN * mean) ** 2) + 1e-9
        z = (limit - mean) / deviation
        excess = np.where(z < _Z[0], mean - limit, deviation * np.interp(z, _Z, _EXCESS))
        dropped = np.rint(counts * np.clip(excess / np.maximum(mean, 1e-9), 0.0, 1.0))
        return dropped.astype(np.int64)

    def _capacity(self, factor: float) -> int:
        return expert_capacity(factor, self._layout.model.seq_len, self._moe.top_k, self._moe.experts)

    def _even(self, pairs: int) -> Routed:
        """The routing under expert choice: all experts have the same load and no token is dropped."""
        experts = self._moe.experts
        counts = np.full((len(self._layers), experts), pairs // experts, dtype=np.int64)
        nothing = np.zeros(len(self._layers), dtype=np.int64)
        return self._over_all_layers(counts, nothing, counts / counts.sum(1, keepdims=True))

    def _over_all_layers(
        self, counts: NDArray[np.int64], dropped: NDArray[np.int64], kept: NDArray[np.float64]
    ) -> Routed:
        layers = self._layout.model.prediction_layers.stop
        whole = Routed(
            np.zeros((layers, self._moe.experts), dtype=np.int64),
            np.zeros(layers, dtype=np.int64),
            np.zeros((layers, self._moe.experts)),
        )
        whole.load[self._layers], whole.dropped[self._layers], whole.kept[self._layers] = (
            counts,
            dropped,
            kept,
        )
        return whole

    def by_ep_rank(self, kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """[layer, ep rank]: share of the layer's token-expert pairs that an ep rank processes under the current
        placement."""
        ep = self._layout.grid.ep
        placed = np.zeros((kept.shape[0], ep))
        for layer, logical in self.placement.items():
            placed[layer] = kept[layer, logical].reshape(ep, -1).sum(1)
        return placed
