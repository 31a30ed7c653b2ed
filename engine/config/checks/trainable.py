"""Models that `engine plan` and `engine simulate` accept but `engine run` does not train yet."""

from engine.config.checks.legal_values import can_predict
from engine.config.layout import Layout
from engine.config.schedule_traits import SCHEDULES

FP8 = (
    "fp8 training needs torchao and the scaled matrix products of a GPU of compute capability 8.9 or higher (Ada, "
    "Hopper, Blackwell) or an MI300, which the engine does not use yet; fp8"
)

UNTRAINED = {  # key -> the feature that an unsupported value selects, and the values that `engine run` trains
    "model.activation": ("an MLP without gate", "swiglu"),
    "model.norm": ("LayerNorm", "rmsnorm"),
    "model.positions": ("a learned position embedding", "rotary"),
    "train.precision": (FP8, "fp32, bf16, fp16"),
}


def untrained(layout: Layout) -> str | None:
    """One sentence that says why `engine run` cannot train with this layout, or None if it can. The user's own model
    declares which keys of [model] it reads (`engine.config.checks.supported`)."""
    for key, (what, trained) in UNTRAINED.items():
        section, _, name = key.partition(".")
        value = _text(getattr(getattr(layout, section), name))
        if value in trained.split(", ") or (section == "model" and layout.model.own):
            continue
        return (
            f"{key} = {value}: {what} can be planned and simulated, but not trained yet; "
            f"legal for engine run: {trained}"
        )
    if layout.grid.pp > 1 and not can_predict(layout, layout.schedule.name):
        whole = ", ".join(name for name in SCHEDULES if can_predict(layout, name))
        return (
            f"model.mtp_layers = {layout.model.mtp_layers}: multi-token prediction is not trained with the split "
            f"backward of schedule.name = {layout.schedule.name} yet; legal for engine run: 0, or schedule.name = "
            f"{whole}"
        )
    return None


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
