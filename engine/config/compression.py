"""Methods of gradient compression between replicas (docs/train/compression.md). Torch-free."""

from dataclasses import dataclass
from typing import Literal, get_args

Method = Literal["none", "bf16", "fp16", "int8", "top_k", "random_k", "threshold", "power_sgd"]
METHODS: tuple[Method, ...] = get_args(Method)

INT8_BLOCK = 256  # elements that share one fp32 scale
INDEX_BYTES = 4  # bytes of an element's position in a sparse message
RANKS = (1, 2, 4, 8, 16, 32, 64)  # values that the knob `compression_rank` offers


@dataclass(frozen=True)
class CompressionValues:
    """The gradient compression method of one step and its parameters. The fields are named like the keys of the section
    [compression] in a layout file."""

    method: Method = "none"
    ratio: float = 0.01
    threshold: float = 2.0
    rank: int = 4
    min_elements: int = 1024


def kept(ratio: float, elements: int) -> int:
    """Number of elements that top_k and random_k send for a shard of `elements` elements; at least 1 unless `elements`
    is 0."""
    return min(elements, max(1, round(ratio * elements))) if elements else 0


def chunk(method: Method, elements: int, ranks: int) -> int:
    """Number of elements in the chunk that each of `ranks` replicas reduces under bf16, fp16 and int8: an equal share
    of `elements`, rounded up (for int8 to whole blocks)."""
    each = -(-elements // ranks)
    return -(-each // INT8_BLOCK) * INT8_BLOCK if method == "int8" else each


def chunk_bytes(method: Method, elements: int) -> int:
    """Bytes of an encoded chunk. int8 has an fp32 scale for each block of `INT8_BLOCK` elements."""
    return elements + 4 * (elements // INT8_BLOCK) if method == "int8" else 2 * elements


def is_compressed(values: CompressionValues, shape: tuple[int, ...], elements: int) -> bool:
    """Whether a rank compresses a shard of this shape and of `elements` elements.

    Small shards are sent uncompressed. Under PowerSGD, vectors are also sent uncompressed, and so are shards whose
    factors would not be smaller than the shard itself. With PowerSGD rank r, the two factors of an m x n matrix have r
    (m + n) elements.
    """
    if values.method == "none" or elements < max(1, values.min_elements):
        return False
    if values.method != "power_sgd":
        return True
    if len(shape) < 2:
        return False
    rows, columns = shape[-2:]
    return power_rank(values.rank, rows, columns) * (rows + columns) < rows * columns


def power_rank(rank: int, rows: int, columns: int) -> int:
    """The PowerSGD rank for a matrix: `rank`, or the smaller dimension of the matrix if that is less."""
    return min(rank, rows, columns)
