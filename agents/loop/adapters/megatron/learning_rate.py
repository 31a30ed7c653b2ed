"""The knob `lr_scale` of Megatron-LM's `OptimizerParamScheduler`."""

from typing import Any

from agents.loop.adapters.knobs.learning_rate import LR_SCALE
from agents.loop.adapters.patches import Patches
from agents.loop.loop import Loop


class ScaledSchedule:
    """A schedule whose `get_lr` is multiplied by a factor. `get_lr` computes each rate anew from the number of samples
    so far, so the factor never acts on a rate that is already scaled. The maximum and minimum rate of the schedule,
    which checkpoints contain, are not scaled.
    """

    def __init__(self, scheduler: Any, patches: Patches) -> None:
        self._scheduler, self._scale = scheduler, 1.0
        patches.wrap(scheduler, "get_lr", lambda original, *args: self._scale * original(*args))

    def declare(self, loop: Loop) -> None:
        """Declare the knob."""
        loop.knob(
            "lr_scale",
            float,
            LR_SCALE,
            value=1.0,
            apply=self._set_scale,
            loss_neutral=False,
            about="factor on the learning rate of the schedule",
        )

    def _set_scale(self, scale: float) -> None:
        self._scale = scale
        self._scheduler.step(0)  # writes the rates of the next step into the parameter groups
