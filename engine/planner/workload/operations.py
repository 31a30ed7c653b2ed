"""Types of the operations that one rank executes for a layer and a micro-batch, forward and backward.

Sizes are those on one rank, after the split over tensor, context and expert parallelism. A linear layer has one matmul
in the forward pass and two in the backward pass: one for the gradient of its input, the other for the gradient of its
weight. The formulas for tensor and sequence parallelism are those of Korthikanti et al. 2022 (arXiv 2205.05198,
sections 4.1 and 4.2), for latent attention those of DeepSeek-AI 2024 (arXiv 2405.04434, section 2.1), and for the
state-space scan those of Dao and Gu 2024 (arXiv 2405.21060, section 6).
"""

from dataclasses import dataclass
from typing import Literal

# Bytes of an exchanged activation, and of a gathered weight.
WIDTH = {
    "fp32": 4,
    "bf16": 2,
    "fp8": 2,
    "nvfp4": 2,
}
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` matmuls of an m x k matrix by a k x n matrix, in `launches` kernels. `accumulate`: the result is
    a weight gradient, which is accumulated in fp32. `wide`: the matmul runs in bf16 even if the job's precision is
    lower."""

    m: float
    n: float
    k: float
    count: float = 1
    launches: float = 1
    accumulate: bool = False
    wide: bool = False

    @property
    def flops(self) -> float:
        return 2 * self.m * self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class AttentionCore:
    """softmax(Q K^T) V of `heads` heads. `keys`: mean number of keys that a query attends to under the mask."""

    heads: float
    queries: float
    keys: float
    qk_dim: float
    v_dim: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """FLOPs of attention's matmuls: two matmuls in the forward pass, and five in the backward pass, one of which
        recomputes the scores (Dao 2023, arXiv 2307.08691, section 3.1)."""
        pairs = 2 * self.heads * self.queries * self.keys
        if self.backward:
            return pairs * (3 * self.qk_dim + 2 * self.v_dim)
        return pairs * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Memory:
    """Pointwise operations that move `bytes` through device memory in `kernels` kernel launches."""

    bytes: float
    kernels: float = 1


def sent_bytes(kind: Kind, size: float, ranks: int) -> float:
    """Bytes that each of `ranks` ranks sends to others in a collective with a buffer of `size` bytes (see
    `Collective`), as the engine's meter counts them (docs/evidence/bytes.md)."""
    if kind == "send":
        return size
    if kind == "all_reduce":
        return 2 * size * (ranks - 1) // ranks
    return size / ranks * (ranks - 1)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over `ranks` ranks that are `stride` apart. Its bytes count as traffic of `axis`. `bytes`: size of
    the whole buffer, after a gather or before a reduction; for an all-to-all, the bytes that a rank sends to all ranks
    including itself; for a send, the size of the message. `behind`: a matmul that can hide the collective, if the
    framework overlaps the two.

    `copies`: how many copies of each token the buffer holds, one for each of the token's experts. `load`: if the buffer
    holds tokens of experts, `bytes` are those of the busiest rank, and `load` is their ratio to the mean over the
    ranks; None for every other collective. `repeated`: whether recomputation repeats the collective."""

    axis: str
    kind: Kind
    bytes: float
    ranks: int
    stride: int = 1
    behind: Gemm | None = None
    copies: int = 1
    load: float | None = None
    repeated: bool = True


Operation = Gemm | AttentionCore | Memory | Collective


@dataclass(frozen=True)
class Work:
    """Operations of a layer, the embedding or the head. `core`: the forward operations that the backward pass repeats
    under selective recompute (in the engine, those of the attention block). `again`: the forward operations that the
    backward pass repeats under full recompute.
    """

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    core: tuple[Operation, ...]
    again: tuple[Operation, ...]
