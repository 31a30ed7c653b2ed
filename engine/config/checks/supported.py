"""What a model supports, and a check that refuses layouts that need more. Torch-free.

A model declares its `Support` (`engine.model.interface`). The built-in model supports everything that the other checks
accept.
"""

from dataclasses import dataclass

import msgspec

from engine.config.grid import ORDER
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES
from engine.config.sections.model import Model

ALL = frozenset({*ORDER, "ep"})
DATA_AND_PIPELINE = frozenset({"dp_replicate", "dp_shard", "pp"})
# Keys that every model may read.
REQUIRED = {"layers", "d_model", "heads", "seq_len", "vocab", "implementation"}


@dataclass(frozen=True)
class Support:
    """The settings of a layout that a model supports: parallel axes, knob values, and keys of the layout file.

    - `axes`: axes of [grid] that may be larger than 1.
    - `recompute`: legal values of the knob `recompute`.
    - `split_backward`: whether zero-bubble schedules may compute input and weight gradients separately.
    - `precisions`: legal values of `train.precision`.
    - `keys`: keys of [model] that the model reads, besides `layers`, `d_model`, `heads`, `seq_len` and `vocab`. Other
      keys must have their default values.
    - `compile`, `documents`: whether `train.compile` and `data.separate_documents` may be true.
    """

    axes: frozenset[str] = DATA_AND_PIPELINE
    recompute: tuple[str, ...] = ("none", "full")
    split_backward: bool = True
    precisions: tuple[str, ...] = ("fp32",)
    keys: frozenset[str] = frozenset()
    compile: bool = False
    documents: bool = False

    def schedule(self, name: str) -> bool:
        """Whether the model can run under the schedule `name`."""
        return self.split_backward or not SCHEDULES[name].split_backward


EVERYTHING = Support(
    axes=ALL,
    recompute=("none", "selective", "full"),
    precisions=("fp32", "bf16", "fp16"),
    keys=frozenset(Model.__struct_fields__),
    compile=True,
    documents=True,
)


def unsupported(layout: Layout, support: Support) -> str | None:
    """One sentence that names the first key of the layout that the model does not support; None if it supports all
    keys."""
    model, train, name = layout.model, layout.train, layout.model.implementation
    for field in msgspec.structs.fields(Model):
        key, value = field.name, getattr(model, field.name)
        if not field.required and key not in support.keys | REQUIRED and value != field.default:
            shown = "a section" if key == "moe" else _text(value)
            return f"model.{key} = {shown} is not read by model.implementation = {name}; legal: {_text(field.default)}"
    for axis in (*ORDER, "ep"):
        if (size := getattr(layout.grid, axis)) > 1 and axis not in support.axes:
            axes = ", ".join(one for one in (*ORDER, "ep") if one in support.axes)
            return (
                f"grid.{axis} = {size} is not supported by model.implementation = {name}; legal: 1 (it supports "
                f"{axes or 'one rank'})"
            )
    fitting = ", ".join(schedule for schedule in SCHEDULES if support.schedule(schedule))
    for key, given, legal, fine in (
        ("schedule.name", layout.schedule.name, fitting, support.schedule(layout.schedule.name)),
        (
            "knobs.recompute",
            layout.knobs.recompute,
            ", ".join(support.recompute),
            layout.knobs.recompute in support.recompute,
        ),
        (
            "train.precision",
            train.precision,
            ", ".join(support.precisions),
            train.precision in support.precisions,
        ),
        ("train.compile", train.compile, "false", support.compile or not train.compile),
        (
            "data.separate_documents",
            layout.data.separate_documents,
            "false",
            support.documents or not layout.data.separate_documents,
        ),
    ):
        if not fine:
            return f"{key} = {_text(given)} is not supported by model.implementation = {name}; legal: {legal}"
    return None


def _text(value: object) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
