"""The learning rate of a step."""

from engine.config.layout import Train


def learning_rate(train: Train, step: int, scale: float) -> float:
    """Linear warm-up, then constant; `scale` is the knob `lr_scale`."""
    return train.lr * scale * min(1.0, (step + 1) / max(1, train.warmup))
