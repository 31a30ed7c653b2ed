"""The precision of sums and softmax."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in the precision that softmax and sums over tokens need."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
