"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018), with the rule of torch's GradScaler.

Gradients below 6e-8 would underflow to zero in fp16. So the loss is multiplied by a scale before the backward pass, and
the gradients are divided by the scale. If a gradient overflows, the step is skipped and the scale is multiplied by
`backoff`; after `interval` steps in a row without overflow, the scale is multiplied by `growth`. All ranks decide from
the same gradient norm whether to skip a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config.sections.training import LossScale


@dataclass
class LossScaler:
    """Holds the loss scale for the next step. Without `settings` (no fp16) the scale is always 1, and gradients are not
    changed."""

    settings: LossScale | None
    scale: float = 1.0
    good_steps: int = 0  # steps without overflow since the scale changed
    skipped: int = 0  # steps of the run that overflowed, or whose gradient was not finite for another reason

    def __post_init__(self) -> None:
        if self.settings:
            self.scale = self.settings.initial

    def restore(self, scale: float | None, good_steps: int, skipped: int) -> None:
        """Continue from a checkpoint. A checkpoint of a run without fp16 has no scale; a run with fp16 that resumes
        from it starts with the initial scale from its settings (`loss_scale.initial`)."""
        self.skipped = skipped
        if self.settings and scale is not None:
            self.scale, self.good_steps = scale, good_steps

    def unscale(self, grads: Sequence[Tensor]) -> None:
        """Divide scaled gradients by the scale, in place."""
        if self.scale != 1.0 and grads:
            torch._foreach_mul_(list(grads), 1.0 / self.scale)

    def update(self, finite: bool) -> str:
        """Adapt the scale after a step. Returns a description of the change, for a message, or an empty string if there
        is no change."""
        if not finite:
            self.skipped += 1
        settings, before = self.settings, self.scale
        if settings is None:
            return ""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= settings.backoff
        elif self.good_steps == settings.interval:
            self.scale, self.good_steps = self.scale * settings.growth, 0
        return "" if self.scale == before else f"the loss scale goes from {before:g} to {self.scale:g}"
