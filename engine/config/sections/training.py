"""Layout sections for the optimisation: optimizer, precision, loss scaling, gradient compression. Torch-free."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from engine.config.compression import CompressionValues, Method
from engine.config.sections.bounds import (
    GRAD_CLIP,
    RATIO,
    THRESHOLD,
    Above,
    AtLeast0,
    Decay,
    Natural,
    Positive,
    PowerRank,
    Scale,
    Share,
)


class Train(Struct, frozen=True):
    """The optimisation."""

    steps: Annotated[Positive, "number of optimizer steps"] = 100
    global_batch: Annotated[Positive, "sequences per step over all ranks"] = 32
    optimizer: Annotated[Literal["adamw", "sgd"], "AdamW, or plain gradient descent"] = "adamw"
    lr: Annotated[AtLeast0, "learning rate after the warm-up"] = 1e-3
    warmup: Annotated[Natural, "steps over which the learning rate rises to lr"] = 0
    lr_schedule: Annotated[
        Literal["constant", "linear", "cosine", "wsd"],
        "after the warm-up: constant; linear or cosine decay from there to the last step; or wsd (warm-up, stable, "
        "decay): constant, then a linear decay in the last steps",
    ] = "constant"
    lr_end: Annotated[Share, "learning rate at the end of the decay, as a share of lr"] = 0.0
    decay: Annotated[Positive | None, "with wsd: steps of the decay; absent: a tenth of steps"] = None
    beta1: Annotated[Decay, "AdamW: decay of the mean of gradients"] = 0.9
    beta2: Annotated[Decay, "AdamW: decay of the mean of squared gradients"] = 0.95
    eps: Annotated[Above, "AdamW: added to the root of the mean of squares"] = 1e-8
    ema: Annotated[
        Decay | None,
        "decay of an exponential moving average of the weights, kept in memory and in checkpoints in "
        "addition to the weights; validation uses it; absent: none",
    ] = None
    mtp_weight: Annotated[
        AtLeast0, "weight of the mean loss of multi-token prediction beside the main loss (DeepSeek-V3: 0.3)"
    ] = 0.3
    weight_decay: Annotated[AtLeast0, "weight decay of matrices; norms have none"] = 0.0
    grad_clip: Annotated[
        Annotated[float, Meta(ge=GRAD_CLIP[0], le=GRAD_CLIP[1])] | None,
        "maximum of the global gradient norm; absent: no clipping",
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "fp8"],
        "precision of activations; weights, sums and updates are fp32; fp16 scales the loss; fp8 is planned and "
        "simulated only (docs/train/precision.md)",
    ] = "fp32"
    zero: Annotated[
        Literal[0, 1, 2, 3],
        "ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also gradients, 3 also weights",
    ] = 2
    compile: Annotated[bool, "whether torch.compile fuses the operations between matrix products"] = False
    deterministic: Annotated[
        bool, "whether torch uses only algorithms that give the same bits in every run; slower on GPUs"
    ] = False


class LossScale(Struct, frozen=True):
    """Dynamic loss scaling with train.precision = fp16 (docs/train/precision.md); the defaults are those of torch's
    GradScaler."""

    initial: Annotated[Scale, "scale of the first step"] = 65536.0
    growth: Annotated[
        Annotated[float, Meta(ge=1.0, le=1024.0)], "factor after `interval` steps without overflow"
    ] = 2.0
    backoff: Annotated[Annotated[float, Meta(ge=1e-3, le=1.0)], "factor after an overflow"] = 0.5
    interval: Annotated[Positive, "steps in a row without overflow before the scale grows"] = 2000


class Compression(Struct, frozen=True):
    """Compression of gradients between the replicas of grid.dp_replicate (docs/train/compression.md). `method`,
    `ratio`, `threshold` and `rank` are the start values of the knobs compression, compression_ratio and so on."""

    method: Annotated[
        Method,
        "16 or 8 bits per number; only the largest, random or above-threshold elements; low-rank factors",
    ] = "none"
    ratio: Annotated[
        Annotated[float, Meta(ge=RATIO[0], le=RATIO[1])], "share of the elements that top_k and random_k send"
    ] = 0.01
    threshold: Annotated[
        Annotated[float, Meta(ge=THRESHOLD[0], le=THRESHOLD[1])],
        "with threshold: elements larger than this many times the root mean square are sent",
    ] = 2.0
    rank: Annotated[PowerRank, "rank of power_sgd's factors"] = 4
    min_elements: Annotated[Natural, "shards with fewer elements are sent uncompressed"] = 1024

    def values(self) -> CompressionValues:
        return CompressionValues(self.method, self.ratio, self.threshold, self.rank, self.min_elements)
