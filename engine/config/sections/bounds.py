"""Annotated types for layout keys; each type states the legal bounds of a value."""

from typing import Annotated

from msgspec import Meta

LARGEST = 2**31 - 1  # largest legal size; products of larger sizes would make arithmetic slow
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
# The number of layers is limited, because the layer split tries each layer as the start of each stage.
Layers = Annotated[int, Meta(ge=1, le=1024)]
VirtualStages = Annotated[int, Meta(ge=1, le=1024)]  # each has at least one layer
FewBatches = Annotated[int, Meta(ge=0, le=64)]
FewLayers = Annotated[int, Meta(ge=0, le=16)]
Scale = Annotated[float, Meta(ge=2.0**-24, le=2.0**32)]
PowerRank = Annotated[int, Meta(ge=1, le=1024)]
Experts = Annotated[int, Meta(ge=1, le=65_536)]
Above = Annotated[float, Meta(gt=0, le=1e9)]
AtLeast0 = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]
Decay = Annotated[float, Meta(ge=0, le=0.999_999)]  # largest decay of a running mean
# The pattern ends in \Z and not in $, because $ also matches before a final newline.
Word = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z",
        description="up to 64 letters, digits, '_', '.' and '-', not beginning with '.' or '-'",
    ),
]
Line = Annotated[
    str,
    Meta(
        pattern=r"\A[^\x00-\x1f]{1,4096}\Z",
        description="1 to 4,096 characters of text, without NUL, line ends and other control characters",
    ),
]
Prompt = Annotated[
    str, Meta(pattern=r"\A[^\x00]{1,4096}\Z", description="1 to 4,096 characters of text, without NUL")
]

Implementation = Annotated[
    str,
    Meta(
        pattern=r"\A(transformer|[A-Za-z_]\w{0,63}(\.[A-Za-z_]\w{0,63}){0,15}:[A-Za-z_]\w{0,63})\Z",
        description="transformer, or the Python import of your own model, such as package.module:Name",
    ),
]
Digest = Annotated[
    str, Meta(pattern=r"\Ablake2b-[0-9a-f]{16}\Z", description="blake2b- and 16 hexadecimal digits")
]

# Bounds of knobs, for start values and for later changes.
CAPACITY_FACTOR = (0.1, 8.0)
LR_SCALE = (0.0, 10.0)
LOSS_COEF = (0.0, 100.0)
BIAS_RATE = (0.0, 1.0)
GRAD_CLIP = (1e-3, 1e3)
RATIO = (1e-6, 1.0)
THRESHOLD = (0.0, 100.0)
