"""What one rank executes for a layer and a micro-batch, forward and backward, as typed operations.

Sizes are those of one rank after tensor, context and expert parallelism. A linear layer has one product forward and
two backward: one gives the gradient of its input, the other that of its weight. Formulas per layer: Korthikanti et al.
2022 (arXiv 2205.05198), sections 4.1 and 4.2, for tensor and sequence parallelism; DeepSeek-AI 2024 (arXiv 2405.04434),
section 2.1, for latent attention; Dao and Gu 2024 (arXiv 2405.21060), section 6, for the state-space scan.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products of m x k by k x n, in `launches` kernels. `accumulate`: a weight gradient, added to an fp32 sum.
    `wide`: always in bf16, also when the job's precision is lower."""

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
    """softmax(Q K^T) V of `heads` heads over `queries` x `keys` pairs that the mask leaves (`keys` is their mean)."""

    heads: float
    queries: float
    keys: float
    qk_dim: float
    v_dim: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """Two products forward; five backward, one of them again (Dao 2023, arXiv 2307.08691, section 3.1)."""
        pairs = 2 * self.heads * self.queries * self.keys
        if self.backward:
            return pairs * (3 * self.qk_dim + 2 * self.v_dim)
        return pairs * (self.qk_dim + self.v_dim)


@dataclass(frozen=True, slots=True)
class Memory:
    """Pointwise work that moves `bytes` through device memory in `kernels` launches."""

    bytes: float
    kernels: float = 1


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the `ranks` of `axis`. `bytes`: the whole buffer, as gathered or before it is reduced; of an
    all-to-all what a rank holds for all ranks; of a send the message. `behind`: a product that can run meanwhile, if
    the framework pipelines the two. `copies`: how often the buffer holds each token, once for each of its experts."""

    axis: str
    kind: Kind
    bytes: float
    ranks: int
    behind: Gemm | None = None
    copies: int = 1


Operation = Gemm | AttentionCore | Memory | Collective


@dataclass(frozen=True)
class Work:
    """Operations of a layer or an end of the model. `core`: the part of forward that selective recompute repeats;
    `again`: that of full recompute."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    core: tuple[Operation, ...]
    again: tuple[Operation, ...]
