"""The learning rate of a step."""

import math
from collections.abc import Callable

from engine.config.sections.training import Train

DECAYS: dict[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
    "wsd": lambda done: 1.0 - done,
}
"""Fraction of lr - lr_end that remains after the fraction `done` (0 to 1) of the decay."""


def learning_rate(train: Train, step: int, scale: float) -> float:
    """The learning rate of `step`: a linear warm-up, then the schedule `train.lr_schedule`. `scale` is the value of the
    knob `lr_scale`.

    With the schedule wsd (warm-up, stable, decay; Hu et al. 2024), the rate stays constant until the decay begins; with
    linear or cosine, the decay begins when the warm-up ends. A decay reaches lr_end only after the last step, so that
    no step has a learning rate of 0, even if lr_end is 0.
    """
    start = (
        max(train.warmup, train.steps - decay_steps(train)) if train.lr_schedule == "wsd" else train.warmup
    )
    done = min(1.0, max(0, step - start) / max(1, train.steps - start))
    left = DECAYS[train.lr_schedule](done)
    factor = min(1.0, (step + 1) / max(1, train.warmup))
    return train.lr * scale * factor * (train.lr_end + (1.0 - train.lr_end) * left)


def decay_steps(train: Train) -> int:
    """The number of steps over which the wsd schedule decays the learning rate."""
    return train.decay or max(1, train.steps // 10)
