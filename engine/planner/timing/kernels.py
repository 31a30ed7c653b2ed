"""Seconds that operations take on one device, without communication: matmuls, attention, pointwise work.

A matmul of m x k by k x n takes 2 m n k / R x (1 + h (1/m + 1/n + 1/k)) seconds. R is the FLOP/s of large matmuls (a
share of the device's peak), and h (`half` in the code) is the number of rows at which a matmul runs at half of this
rate if its other dimensions are large. The terms with h account for partial tiles at the edges, for a last wave that
does not fill the device, and for the start and end of each tile's loop. A matmul never takes less than the time to read
its operands from memory and write its result (roofline, Williams et al. 2009). A grouped matmul consists of `count`
matmuls with few rows each. The matmuls of small experts therefore reach a low rate, both because of the terms with h
and because of memory reads.
"""

from engine.config.refusal import RefusedError
from engine.planner.hardware.description import Hardware
from engine.planner.workload.operations import AttentionCore, Gemm, Memory

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5}  # bytes of an element of a matmul's operands
# Rate of the backward pass over that of the forward pass: FlashAttention-2 (arXiv 2307.08691), figures 5 and 6.
ATTENTION_BACKWARD = 0.8
ACCUMULATED = 8  # bytes per element to read and write an fp32 sum


class Kernels:
    """Predicts the time of operations on one device at one precision."""

    def __init__(self, hardware: Hardware, precision: str):
        device, efficiency = hardware.device, hardware.efficiency
        self.bandwidth = device.memory_bandwidth * efficiency.memory
        wide = "bf16" if precision in ("fp8", "nvfp4") else precision
        if not device.peak.keys() >= {precision, wide}:
            legal = ", ".join(sorted(device.peak))
            raise RefusedError(f"{hardware.name} has no matrix products in {precision}; legal: {legal}")
        self.rates = {
            False: (device.peak[precision] * efficiency.gemm, BYTES[precision], efficiency.half_rows),
            True: (device.peak[wide] * efficiency.gemm, BYTES[wide], efficiency.half_rows),
        }
        # The start and end of a tile take the same time at each precision, so at a higher peak they cost more FLOPs.
        rate, size, half = self.rates[False]
        self.rates[False] = (rate, size, half * device.peak[precision] / device.peak[wide])
        self.attention_rate = device.peak[wide] * efficiency.attention
        self.half = efficiency.half_rows

    def gemm(self, op: Gemm) -> float:
        rate, size, half = self.rates[op.wide]
        lost = 1 + half * (1 / op.m + 1 / op.n + 1 / op.k)
        result = ACCUMULATED if op.accumulate else 2
        moved = size * (op.m * op.k + op.k * op.n) + result * op.m * op.n
        return max(op.flops / rate * lost, moved * op.count / self.bandwidth)

    def attention(self, op: AttentionCore) -> float:
        rate = self.attention_rate * (ATTENTION_BACKWARD if op.backward else 1)
        return op.flops / rate * (1 + self.half / op.keys)

    def memory(self, op: Memory) -> float:
        return op.bytes / self.bandwidth
