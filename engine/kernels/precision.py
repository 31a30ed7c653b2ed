"""Precision of softmax and of sums over tokens: at least fp32."""

import torch
from torch import Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` unchanged if it is fp64, else converted to fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
