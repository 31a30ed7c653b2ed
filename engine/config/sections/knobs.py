"""Start values of the knobs. Torch-free."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine.config.sections.bounds import BIAS_RATE, CAPACITY_FACTOR, LOSS_COEF, LR_SCALE, Positive


class Knobs(Struct, frozen=True):
    """Start values of the knobs, which can be changed while the run trains (docs/operate/control.md)."""

    micro_batches: Annotated[Positive, "micro-batches per step of a data-parallel rank"] = 1
    capacity_factor: Annotated[
        Annotated[float, Meta(ge=CAPACITY_FACTOR[0], le=CAPACITY_FACTOR[1])] | None,
        "maximum tokens of a sequence per expert, as a multiple of an even share; absent: dropless",
    ] = None
    recompute: Annotated[
        Literal["none", "selective", "full"],
        "activation checkpointing: activations that backward computes again; selective: attention only",
    ] = "none"
    lr_scale: Annotated[
        Annotated[float, Meta(ge=LR_SCALE[0], le=LR_SCALE[1])], "factor on the learning rate"
    ] = 1.0
    aux_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])],
        "weight of the auxiliary load-balancing loss, if balance includes aux",
    ] = 0.01
    z_loss_coef: Annotated[
        Annotated[float, Meta(ge=LOSS_COEF[0], le=LOSS_COEF[1])],
        "weight of the router z-loss (on large logits)",
    ] = 0.0
    bias_rate: Annotated[
        Annotated[float, Meta(ge=BIAS_RATE[0], le=BIAS_RATE[1])],
        "added to the bias of an underloaded expert in each step, if balance includes bias",
    ] = 0.001
