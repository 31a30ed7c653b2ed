"""The knob `lr_scale`: a factor on the learning rate of a torch scheduler.

A scheduler computes each learning rate from its base rates, or from the last rate of the parameter group. A factor
applied only to the group's rate would be lost at the scheduler's next step. So the knob also scales the scheduler's
base rates and limits.
"""

from collections.abc import Iterator
from typing import Any

from agents.loop.loop import Loop

LR_SCALE = (1e-3, 10.0)
"""Legal factors. 0 is not legal, because a scheduler that computes each rate from the last one would stay at 0."""

# The attributes from which a scheduler computes learning rates: base rates and limits, as one number or one per
# parameter group. The last three are those of DeepSpeed's schedulers.
RATES = ("base_lrs", "eta_min", "min_lrs", "max_lrs", "delta_lrs", "org_lrs", "min_lr")

# Schedulers that write their own rates into the parameter groups, from limits that are not in `RATES`.
UNSCALABLE = ("OneCycleLR", "SWALR", "GreedyLR")


class LearningRate:
    """Multiplies the learning rates of an optimizer and its schedulers by one factor.

    `refusal`: why the factor cannot be changed; "" if it can. `scale`: the current factor. In a run that was resumed
    from a checkpoint with scaled rates, `scale` is relative to the rates of the original run.
    """

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self._optimizer = optimizer
        self._schedulers = list(_innermost(scheduler)) if scheduler is not None else []
        names = [type(one).__name__ for one in self._schedulers]
        wrong = next((name for name in names if name in UNSCALABLE), None)
        self.refusal = f"lr_scale does not work with the scheduler {wrong}" if wrong else ""
        self.scale = _scale_of(optimizer, self._schedulers)

    def declare(self, loop: Loop) -> None:
        """Declare the knob, or log why it is not available."""
        if self.refusal:
            return loop.event(f"no knob lr_scale: {self.refusal}")
        about = "factor on the learning rate of the schedule"
        return loop.knob(
            "lr_scale",
            float,
            LR_SCALE,
            value=self.scale,
            apply=self.set_scale,
            loss_neutral=False,
            about=about,
        )

    def current(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_scale(self, scale: float) -> None:
        """Change the learning rates so that the factor is `scale` from the next update on."""
        by, self.scale = scale / self.scale, scale
        for scheduler in self._schedulers:
            for name in RATES:
                if (rates := getattr(scheduler, name, None)) is not None:
                    setattr(scheduler, name, _scaled(rates, by))
        for group in self._optimizer.param_groups:
            group["lr"] = _scaled(group["lr"], by)
        for scheduler in self._schedulers:
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [group["lr"] for group in self._optimizer.param_groups]


def _innermost(scheduler: Any) -> Iterator[Any]:
    """The schedulers inside wrappers (such as Accelerate's) and inside composite schedulers (such as `SequentialLR`).
    The composite schedulers themselves are included, because they also store the last learning rate.
    """
    wrapped = getattr(scheduler, "scheduler", None)
    if wrapped is not None:
        yield from _innermost(wrapped)
        return
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _innermost(part)


def _scaled(rates: Any, by: float) -> Any:
    return [rate * by for rate in rates] if isinstance(rates, list) else rates * by


def _scale_of(optimizer: Any, schedulers: list[Any]) -> float:
    """The factor in force when a run is resumed: the scheduler's base rate divided by the optimizer's `initial_lr`,
    which this knob never changes. Returns 1 if one of the two is missing, or if the ratio is not a legal factor."""
    initial = optimizer.param_groups[0].get("initial_lr")
    base = next((one.base_lrs[0] for one in schedulers if getattr(one, "base_lrs", None)), None)
    if not initial or base is None:
        return 1.0
    scale = float(base) / float(initial)
    return scale if LR_SCALE[0] <= scale <= LR_SCALE[1] else 1.0
