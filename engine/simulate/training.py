"""Simulated loss and gradient norm: plausible curves without any training.

The loss falls as a power law of the progress so far; each step adds to the progress an amount that depends on the
step's learning rate. Knobs change the loss in the same direction as in a real run: with a learning rate of zero the
loss stops falling, and with one that is far too large it diverges. Dropped tokens and a large balancing loss raise the
loss.
"""

import math

import numpy as np

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.learning_rate import learning_rate
from engine.simulate.scenario import Event, LossSpike, NotFinite, Scenario

FLOOR = 0.16  # final loss that a run approaches, as a share of the first loss
HALVED = 30.0  # number of steps of the fast decrease at the beginning
POWER = 0.33
BEST = 4.0  # factor on the learning rate up to which a larger factor speeds up progress
DIVERGES = 6.0  # factor on the learning rate above which the loss rises
DROPS_COST = 0.3  # relative increase of the loss if all token-expert pairs are dropped
BALANCING_COSTS = 0.002  # relative increase of the loss for each unit of aux_loss_coef
SPIKED_NORM = 25.0  # relative increase of the gradient norm if the loss jumps to twice its value
UNCLIPPED = 3.0  # factor on the half-life of a loss jump if gradients are not clipped


class Training:
    """The simulated loss and gradient norm of a run. Call `advance` once per step."""

    def __init__(self, layout: Layout, scenario: Scenario, seed: int):
        self._layout, self._scenario, self._seed = layout, scenario, seed
        self._first = math.log(layout.model.vocab)
        self._progress = self._harm = self._excess = 0.0

    def advance(self, step: int, values: KnobValues, drop_share: float) -> tuple[float, float]:
        """Loss and gradient norm of a step; NaN if the scenario makes them non-finite."""
        events = [event for event in self._scenario.events if event.in_force(step)]
        rng = np.random.default_rng([self._seed, 4, step])
        noise, norm_noise = rng.standard_normal(2).tolist()
        self._spike(step, values, events)
        fall = (1.0 + self._progress / HALVED) ** -POWER
        level = self._first * (FLOOR + (1.0 - FLOOR) * fall)
        costs = 1.0 + DROPS_COST * drop_share + BALANCING_COSTS * values.aux_loss_coef + self._harm
        loss = level * (costs + self._excess) * (1.0 + self._scenario.noise.loss * noise)
        norm = (0.15 + 2.0 * fall**4) * math.exp(0.12 * norm_noise) * (1.0 + SPIKED_NORM * self._excess)
        if any(isinstance(event, NotFinite) for event in events):
            return math.nan, math.nan  # nothing is learned
        train = self._layout.train
        scale = learning_rate(train, step, values.lr_scale) / train.lr if train.lr else 0.0
        self._progress += scale * math.exp(-((scale / BEST) ** 2) / 2)
        self._harm = self._harm * 0.97 + 0.01 * max(0.0, scale - DIVERGES)
        return loss, norm

    def _spike(self, step: int, values: KnobValues, events: list[Event]) -> None:
        half_lives = [event.half_life for event in self._scenario.events if isinstance(event, LossSpike)]
        half_life = max(half_lives, default=1) * (UNCLIPPED if values.grad_clip is None else 1.0)
        self._excess *= 0.5 ** (1.0 / half_life)
        for event in events:
            if isinstance(event, LossSpike) and event.step == step:
                self._excess += event.size
