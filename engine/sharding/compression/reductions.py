"""Compressed sums of gradients over the replicas, with error feedback (docs/train/compression.md).

The *residual* of a parameter is the part of its gradient that compression has left out. The next step adds the residual
to the gradient before compression, so nothing is lost: in each step, the sum of all replicas' gradients and old
residuals equals the reduced gradient plus the sum of all replicas' new residuals. Residuals are in units of the true
gradient, without the loss scale. If a step is skipped, its residuals are discarded and the old residuals are kept.
"""

import hashlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from engine.config.compression import CompressionValues, is_compressed, power_rank
from engine.parallel.collectives import AsyncCollective, Axis
from engine.parallel.local_shards import local_shard
from engine.sharding.compression.methods import Reduction, power_sgd, quantised, random_k, threshold, top_k


@dataclass(frozen=True, eq=False)
class Segment:
    """This rank's shard of the gradient of one parameter, padded to `shape`, within the flat gradient of an FSDP
    unit."""

    parameter: nn.Parameter
    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.size]


class Running:
    """A reduction in progress. `advance` waits for the current collective and starts the next one."""

    def __init__(self, steps: Generator[AsyncCollective, None, None], axis: Axis):
        self._steps, self._axis = steps, axis
        self._current: AsyncCollective | None = None
        self._next()

    def _next(self) -> None:
        """Start collectives up to and including the next one that must be waited for. On a GPU, the stream orders the
        collectives and the host need not wait for any, so this call starts all collectives of the reduction."""
        self._current = None
        for started in self._steps:
            self._axis.meter.readings.replica_bytes += started.sent_bytes
            if started.in_background:
                self._current = started
                return

    def advance(self) -> bool:
        """Wait for the current collective, and start the next one. Returns whether the reduction is complete."""
        if self._current:
            self._current.wait()
            self._next()
        return self._current is None


class Compression:
    """Sums the gradients of this rank's shards over the replicas, and keeps the residuals.

    `residuals`, and `factors`, from which PowerSGD starts its iteration, come from the last step that updated the
    weights.
    """

    def __init__(self, replicas: Axis, seed: int = 0):
        self.values = CompressionValues()
        self.residuals: dict[nn.Parameter, Tensor] = {}
        self.factors: dict[nn.Parameter, Tensor] = {}
        self._replicas, self._seed = replicas, seed
        self._step, self._scale = 0, 1.0
        self._new_residuals: dict[nn.Parameter, Tensor] = {}
        self._new_factors: dict[nn.Parameter, Tensor] = {}

    def begin(self, step: int, values: CompressionValues, loss_scale: float = 1.0) -> None:
        """Begin a step whose gradients are `loss_scale` times the true gradients."""
        self._step, self.values, self._scale = step, values, loss_scale
        self._new_residuals, self._new_factors = {}, {}

    def settle(self, updated: bool) -> None:
        """End a step. If the step did not update the weights, residuals and factors stay as they were."""
        if updated:
            self.residuals, self.factors = self._new_residuals, self._new_factors
        self._new_residuals, self._new_factors = {}, {}

    def start(self, number: int, segments: Sequence[Segment], flat: Tensor) -> Running:
        """Start the in-place sum of `flat`, the gradient of the FSDP unit with index `number`, over the replicas."""
        readings = self._replicas.meter.readings
        readings.replica_bytes_plain += 2 * flat.nbytes * (self._replicas.size - 1) // self._replicas.size
        return Running(self._reduce(number, segments, flat), self._replicas)

    def flush(self, parameters: Iterable[nn.Parameter]) -> None:
        """If there is a single replica, gradients are not compressed; then add the residuals left by an earlier layout
        with several replicas to the gradients."""
        if self._replicas.size == 1 and self.residuals:
            for parameter in parameters:
                if parameter in self.residuals and parameter.grad is not None:
                    local_shard(parameter.grad).add_(self.residual(parameter), alpha=self._scale)

    def residual(self, parameter: nn.Parameter) -> Tensor:
        """The residual of this rank's shard of a parameter, without padding; zeros if there is none."""
        shape = local_shard(parameter).shape
        if parameter not in self.residuals:
            self.residuals[parameter] = local_shard(parameter.detach()).new_zeros(shape)
        return self.residuals[parameter].flatten()[: shape.numel()].view(shape)

    def _reduce(
        self, number: int, segments: Sequence[Segment], flat: Tensor
    ) -> Generator[AsyncCollective, None, None]:
        for segment in segments:
            if segment.parameter in self.residuals:
                residual = self.residuals[segment.parameter].flatten()
                segment.of(flat)[: len(residual)].add_(residual, alpha=self._scale)
        packed = [s for s in segments if is_compressed(self.values, s.shape, s.size)]
        if not packed:
            yield self._replicas.start_all_reduce(flat)
            return
        exact = [s for s in segments if s not in packed]
        sums = torch.cat([s.of(flat) for s in exact]) if exact else flat[:0]
        exactly = self._replicas.start_all_reduce(sums) if exact else None
        x = torch.cat([s.of(flat) for s in packed])
        total, sent = yield from self._compressed(number, packed, x)
        if exactly:
            yield exactly
        left = x.sub_(sent).div_(self._scale)
        for segment, part, rest in zip(packed, _split(total, packed), _split(left, packed), strict=True):
            segment.of(flat).copy_(part)
            self._new_residuals[segment.parameter] = rest.view(segment.shape)
        for segment, part in zip(exact, _split(sums, exact), strict=True):
            segment.of(flat).copy_(part)

    def _compressed(self, number: int, packed: Sequence[Segment], x: Tensor) -> Reduction:
        values, axis = self.values, self._replicas
        match values.method:
            case "bf16" | "fp16" | "int8":
                return quantised(x, axis, values.method)
            case "top_k":
                return top_k(x, axis, values.ratio)
            case "random_k":
                return random_k(x, axis, values.ratio, _number(self._seed, self._step, number))
            case "threshold":
                return threshold(x, axis, values.threshold)
            case "power_sgd":
                return self._low_rank(packed, x)
        raise AssertionError(values.method)

    def _low_rank(self, packed: Sequence[Segment], x: Tensor) -> Reduction:
        matrices = [
            part.view(-1, *segment.shape[-2:])
            for part, segment in zip(_split(x, packed), packed, strict=True)
        ]
        starts = [self._factor(segment, x) for segment in packed]
        after: list[Tensor] = []
        result = yield from power_sgd(matrices, starts, self._replicas, after)
        self._new_factors |= {s.parameter: factor for s, factor in zip(packed, after, strict=True)}
        return result

    def _factor(self, segment: Segment, like: Tensor) -> Tensor:
        """The factor from which PowerSGD's iteration starts: the last step's factor or, if there is none of this shape,
        a random factor that is equal on all replicas."""
        shape = factor_shape(segment.shape, self.values.rank)
        factor = self.factors.get(segment.parameter)
        if factor is None or factor.shape != shape:
            generator = torch.Generator().manual_seed(_number(self._seed, segment.name))
            factor = torch.randn(shape, generator=generator, dtype=torch.float32).to(like)
        return factor


def factor_shape(shape: tuple[int, ...], rank: int) -> torch.Size:
    """The shape [b, n, r] of PowerSGD's factor for a shard that consists of b matrices of m x n elements."""
    rows, columns = shape[-2:]
    return torch.Size((prod(shape[:-2]), columns, power_rank(rank, rows, columns)))


def _split(flat: Tensor, segments: Sequence[Segment]) -> Sequence[Tensor]:
    return torch.split(flat, [segment.size for segment in segments])


def _number(*parts: object) -> int:
    """A 63-bit seed, computed as a hash of `parts`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
