"""The current values of the knobs (settings that can change while the run trains), which each step reads. A knob change
sets new values between two steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import structs

from engine.config.compression import CompressionValues
from engine.config.layout import Layout

# Knob -> key of [compression] that holds its start value.
COMPRESSION_KNOBS = {
    "compression": "method",
    "compression_ratio": "ratio",
    "compression_threshold": "threshold",
    "compression_rank": "rank",
}


@dataclass
class KnobValues:
    recompute: str = "none"
    capacity_factor: float | None = None  # None means dropless, or 1 under expert choice
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    # 1 / number of sequences in the global batch: both losses are means over sequences.
    aux_scale: float = 1.0
    loss_scale: float = 1.0  # factor on all losses before the backward pass, with fp16
    bias_rate: float = 0.0
    lr_scale: float = 1.0
    grad_clip: float | None = None  # maximum of the global gradient norm; None = no clipping
    compression: CompressionValues = field(default_factory=CompressionValues)

    @classmethod
    def of(cls, layout: Layout) -> "KnobValues":
        """The initial knob values from a layout."""
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
            compression=layout.compression.values(),
        )


def with_knobs(layout: Layout, values: Mapping[str, object]) -> Layout:
    """A copy of the layout with these knob values. Names that are not layout keys are ignored. The new layout is not
    checked."""
    held = {field: values[field] for field in structs.asdict(layout.knobs) if field in values}
    return structs.replace(
        layout,
        knobs=structs.replace(layout.knobs, **held),
        schedule=structs.replace(layout.schedule, name=str(values.get("schedule", layout.schedule.name))),
        train=structs.replace(layout.train, zero=int(str(values.get("zero", layout.train.zero)))),
        compression=structs.replace(
            layout.compression,
            **{key: values[knob] for knob, key in COMPRESSION_KNOBS.items() if knob in values},
        ),
    )
