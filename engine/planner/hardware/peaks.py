"""Peak FLOP/s of devices and model FLOPs of a training step, for model FLOPs utilisation (MFU). Torch-free.

Peaks are *dense*. Data sheets often list the rate with structured sparsity, which is twice the dense rate; the engine
does not use structured sparsity. If a data sheet lists only the sparse rate, the table contains half of that rate.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.config.sections.model import Model
from engine.planner.layer_split import layer_weight

MIG = "MIG"  # this word is in the device name of a MIG partition


@dataclass(frozen=True)
class Peak:
    """Dense TFLOP/s of matmuls by input precision, with fp32 accumulation."""

    bf16: float
    tf32: float
    fp32: float


PEAKS = {  # keys are patterns for CUDA's full device name
    "NVIDIA B200": Peak(2250.0, 1125.0, 75.0),  # an eighth of the value for 8 GPUs in the HGX B200 data sheet
    "NVIDIA GH200 .*": Peak(989.4, 494.7, 66.9),  # same rates as H100 SXM: GH200 data sheet
    "NVIDIA H200 NVL": Peak(835.5, 417.5, 60.0),  # H200 data sheet
    "NVIDIA H200": Peak(989.4, 494.7, 66.9),  # same rates as H100 SXM: H200 data sheet
    "NVIDIA H100 80GB HBM3": Peak(989.4, 494.7, 66.9),  # SXM5: H100 architecture white paper, table 2
    "NVIDIA H100 PCIe": Peak(756.0, 378.0, 51.2),  # H100 architecture white paper, table 2
    "NVIDIA H100 NVL": Peak(835.5, 417.5, 60.0),  # H100 data sheet
    "NVIDIA A100[ -].*": Peak(312.0, 156.0, 19.5),  # A100 architecture white paper, table 1
    "NVIDIA L40S": Peak(362.05, 183.0, 91.6),  # L40S data sheet
    "NVIDIA L40": Peak(181.05, 90.5, 90.5),  # L40 data sheet
    "NVIDIA L4": Peak(121.0, 60.0, 30.3),  # L4 data sheet
    "NVIDIA A10": Peak(125.0, 62.5, 31.2),  # A10 data sheet
    "NVIDIA GeForce RTX 4090": Peak(165.2, 82.6, 82.6),  # Ada architecture white paper, appendix A
    "NVIDIA GeForce RTX 3090": Peak(71.0, 35.6, 35.6),  # GA102 architecture white paper, appendix A
}


def peak_flops(device: str, precision: str) -> float | None:
    """Dense FLOP/s of the device with this CUDA device name; None if unknown, or if the device is a MIG partition."""
    if MIG in device.split():
        return None
    peak = next((peak for name, peak in PEAKS.items() if re.fullmatch(name, device)), None)
    rate: float | None = getattr(peak, precision, None)
    return None if rate is None else rate * 1e12


def multiply_adds(model: Model, layer: int | None) -> float:
    """Multiply-adds per token of the built-in model: in layer `layer` without its routed experts, or, if `layer` is
    None, in the head."""
    return model.d_model * model.vocab if layer is None else layer_weight(model, layer, pairs=0)


def step_flops(
    model: Model,
    tokens: float,
    pairs: int,
    layers: Iterable[int] | None = None,
    head: bool = True,
    multiply_adds: Callable[[Model, int | None], float] = multiply_adds,
) -> float:
    """Model FLOPs of a step with `tokens` tokens in which the routed experts process `pairs` (token, expert) pairs.

    `layers` and `head` restrict the count, for example to one stage. `multiply_adds(model, layer)` is the number of
    multiply-adds per token in a layer without its routed experts, or in the head if `layer` is None.

    Each multiply-add of a token's forward pass counts as 6 FLOPs: 2 in the forward pass and 4 in the backward pass,
    which multiplies the gradient by both operands (Kaplan et al. 2020, section 2.1; PaLM, Chowdhery et al. 2022,
    appendix B). The count includes the head (tied or not), the router, the shared experts and the experts that process
    the token. The count excludes the embedding, which is a lookup. Attention adds 6 S H C FLOPs per token and layer,
    half of PaLM's 12 S H C: under the causal mask a query attends to half of the keys on average. Dropped (token,
    expert) pairs and recomputation are not counted. Under expert choice, the pairs that the experts chose are counted.
    If `head` is True, the layers of multi-token prediction are counted too, each with its projection [D, 2 D] and the
    head.
    """
    each = sum(multiply_adds(model, layer) for layer in (range(model.layers) if layers is None else layers))
    if head:
        joint = 2 * model.d_model**2
        further = model.mtp_layers and multiply_adds(model, model.layers - 1) + joint + multiply_adds(
            model, None
        )
        each += multiply_adds(model, None) + model.mtp_layers * further
    expert = 3 * model.d_model * model.moe.d_expert if model.moe else 0
    return 6.0 * (tokens * each + pairs * expert)
