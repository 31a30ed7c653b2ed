"""What a step reads afresh each time; the knobs turn it between steps."""

from dataclasses import dataclass

from engine.config.layout import Layout


@dataclass
class KnobValues:
    recompute: str = "none"
    capacity_factor: float | None = None  # None = dropless; under expert choice, 1
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    aux_scale: float = 1.0  # 1 / sequences of the global batch: what both losses are a mean over
    bias_rate: float = 0.0
    lr_scale: float = 1.0
    grad_clip: float | None = None  # the global norm's most; None = any

    @classmethod
    def of(cls, layout: Layout) -> "KnobValues":
        """The start values of a layout."""
        knobs = layout.knobs
        return cls(
            recompute=knobs.recompute,
            capacity_factor=knobs.capacity_factor,
            aux_loss_coef=knobs.aux_loss_coef,
            z_loss_coef=knobs.z_loss_coef,
            aux_scale=1.0 / layout.train.global_batch,
            bias_rate=knobs.bias_rate,
            lr_scale=knobs.lr_scale,
            grad_clip=layout.train.grad_clip,
        )
