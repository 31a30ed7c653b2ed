"""Messages with which the replicas sum the gradient of an FSDP unit, for each method of compression.

The engine's reductions (engine/sharding/compression) send exactly these messages; docs/evidence/bytes.md derives their
sizes. `shards` are the shapes of a unit's shards on one rank, including FSDP's padding. P replicas sum the gradients of
these shards.
"""

from collections.abc import Callable, Iterator, Sequence
from math import erfc, prod, sqrt
from typing import NamedTuple

from engine.config.compression import (
    INDEX_BYTES,
    CompressionValues,
    chunk,
    chunk_bytes,
    is_compressed,
    kept,
    power_rank,
)
from engine.planner.workload.operations import Kind

Shape = tuple[int, ...]
NUMBER = 4  # bytes of a gradient's element
COUNT = 8  # bytes of the element count that a replica sends


class Message(NamedTuple):
    """One collective. `size`: bytes of the collective's buffer; for an all-gather or an all-to-all, the bytes of all
    replicas' parts together."""

    kind: Kind
    size: float


def messages(values: CompressionValues, shards: Sequence[Shape], ranks: int) -> Iterator[Message]:
    """The collectives that sum one FSDP unit's gradient over the replicas; `ranks`: number of replicas. With the method
    `threshold`, the number of elements sent depends on the data; the expected number for Gaussian gradients is used."""
    packed = [shape for shape in shards if is_compressed(values, shape, prod(shape))]
    exact = sum(prod(shape) for shape in shards) - sum(prod(shape) for shape in packed)
    if exact:
        yield Message("all_reduce", NUMBER * exact)
    if packed:
        yield from _METHODS[values.method](values, packed, ranks)


def _chunks(values: CompressionValues, packed: Sequence[Shape], ranks: int) -> Iterator[Message]:
    n = sum(map(prod, packed))
    size = ranks * chunk_bytes(values.method, chunk(values.method, n, ranks))
    yield Message("all_to_all", size)
    yield Message("all_gather", size)


def _largest(values: CompressionValues, packed: Sequence[Shape], ranks: int) -> Iterator[Message]:
    yield Message("all_gather", ranks * (NUMBER + INDEX_BYTES) * kept(values.ratio, sum(map(prod, packed))))


def _random(values: CompressionValues, packed: Sequence[Shape], ranks: int) -> Iterator[Message]:
    yield Message("all_reduce", NUMBER * kept(values.ratio, sum(map(prod, packed))))


def _outstanding(values: CompressionValues, packed: Sequence[Shape], ranks: int) -> Iterator[Message]:
    expected = round(_sent_share(values) * sum(map(prod, packed)))
    yield Message("all_gather", ranks * COUNT)
    yield Message("all_gather", ranks * (NUMBER + INDEX_BYTES) * expected)


def _factors(values: CompressionValues, packed: Sequence[Shape], ranks: int) -> Iterator[Message]:
    for side in (-2, -1):
        numbers = sum(
            prod(shape[:-2]) * shape[side] * power_rank(values.rank, *shape[-2:]) for shape in packed
        )
        yield Message("all_reduce", NUMBER * numbers)


def _sent_share(values: CompressionValues) -> float:
    """Share of the elements that a sparse method sends; for the method `threshold`, that of Gaussian gradients."""
    return erfc(values.threshold / sqrt(2)) if values.method == "threshold" else values.ratio


_METHODS: dict[str, Callable[[CompressionValues, Sequence[Shape], int], Iterator[Message]]] = {
    "bf16": _chunks,
    "fp16": _chunks,
    "int8": _chunks,
    "top_k": _largest,
    "random_k": _random,
    "threshold": _outstanding,
    "power_sgd": _factors,
}

PASSES = {
    "none": 0,
    "bf16": 14,
    "fp16": 16,
    "int8": 18,
    "top_k": 14,
    "random_k": 16,
    "threshold": 14,
    "power_sgd": 12,
}
"""Number of times that compression reads or writes a gradient's elements, counted in engine/sharding/compression:
adding the residual, packing, encoding, decoding, the new residual. The planner estimates the time of compression from
this number."""


def held_copies(values: CompressionValues, ranks: int) -> tuple[float, float]:
    """Memory of the sum of one FSDP unit's gradient over `ranks` replicas, in copies of the unit's shard in fp32 and
    without the gradient itself: while the sum waits for its last collective, and at its peak. One of the copies becomes
    the new residual. Counted in engine/sharding/compression; a test compares the numbers with the tensors alive there.
    """
    if values.method in ("bf16", "fp16", "int8"):
        encoded = 0.25 if values.method == "int8" else 0.5
        decoding = 1.0 if values.method == "int8" else 0.0
        owned = 1 / ranks  # the sums of the own chunk
        waiting = 1 + 2 * encoded + owned * (1 + encoded)
        return waiting, max(4.25, 2 + waiting + max(owned, decoding))
    # A position takes 8 bytes, a value and its position in a message 8; the messages of all replicas are gathered.
    sent = _sent_share(values)
    if values.method == "top_k":
        return 1 + (4 + 2 * ranks) * sent, 3 + (5 + 2 * ranks) * sent
    if values.method == "threshold":
        return 1 + (6 + 2 * ranks) * sent, 3 + (7 + 2 * ranks) * sent
    if values.method == "random_k":
        return 2 + 3 * sent, 3.75 + 2 * sent
    return 1.0, 4.0  # power_sgd, whose factors are small
