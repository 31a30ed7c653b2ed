"""Storage for torch.distributed.checkpoint (DCP): tensors as plain bytes, with a JSON index.

Torch's own storage pickles its index and uses `torch.load` to read items that are not tensors. Unpickling can execute
arbitrary code, so this module uses neither pickle nor `torch.load`. DCP plans what each rank saves and loads, and this
module writes and reads the bytes.
"""

import math
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import FileIO
from itertools import product
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from agents.rundir.bounded_read import open_ordinary
from engine.checkpoint.tensor_index import INDEX, ITEM_BYTES, Chunk, Index, Stored, read_index, write_index
from engine.config.refusal import RefusedError

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# For groups in which ranks wait for the files of other ranks. A slow disk may need hours; a rank that has died closes
# its connections, so nobody waits for it.
FILES_TIMEOUT = timedelta(hours=24)
LEAST_RUN = 64  # bytes; reading shorter runs one by one takes longer than reading the bytes between them


@dataclass(frozen=True)
class _At:
    """The file that contains a chunk, and the offset in the file at which the chunk begins."""

    file: str
    offset: int


class Writer(StorageWriter):
    """Writes one file per rank; rank 0 also writes the index.

    `sums` maps each file of this rank to its CRC-32, computed from the bytes in memory. So the checksum also detects
    errors that happen while the file is written to disk.
    """

    def __init__(self, folder: Path, rank: int):
        self._folder, self._name = folder, f"rank-{rank}.bin"
        self.sums: dict[str, int] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None, "a writer has one folder"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, total = [], 0
        with (self._folder / self._name).open("xb") as file:
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), item.index.fqn
                raw, at = bytes_of(tensor.detach().cpu().contiguous()), file.tell()
                file.write(raw.data)
                total = zlib.crc32(raw.data, total)
                results.append(WriteResult(item.index, raw.nbytes, _At(self._name, at)))
            file.flush()
            os.fsync(file.fileno())
        self.sums[self._name] = total
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        index = {name: _stored(name, entry, places) for name, entry in metadata.state_dict_metadata.items()}
        raw = write_index(index)
        with (self._folder / INDEX).open("xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        self.sums[INDEX] = zlib.crc32(raw)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class Reader(StorageReader):
    """Reads what a `Writer` wrote to `folder`. `files` maps each file to its size in the manifest."""

    def __init__(self, folder: Path, files: Mapping[str, int]):
        self._folder, self._files = folder, files
        self._index: Index = {}
        self._chunks: dict[MetadataIndex, Chunk] = {}
        self._refusal: RefusedError | None = None

    @property
    def index(self) -> Index:
        """The index of the checkpoint, after `read_metadata`."""
        return self._index

    def reset(self, checkpoint_id: Any = None) -> None:
        assert checkpoint_id is None, "a reader has one folder"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            self._index = read_index(self._folder, self._files)
        except RefusedError as refusal:
            # `set_up_storage_reader` raises this error. If it were raised here, DCP would log it with a traceback.
            self._refusal = refusal
        for name, stored in self._index.items():
            self._chunks |= {MetadataIndex(name, chunk.offsets): chunk for chunk in stored.chunks}
        return Metadata({name: _entry(stored) for name, stored in self._index.items()})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        if self._refusal:
            raise self._refusal

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Chunk, ReadItem]]] = {}
        for item in plan.items:
            assert item.type == LoadItemType.TENSOR, item.storage_index.fqn
            chunk = self._chunks[item.storage_index]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, wanted in by_file.items():
            with open_ordinary(self._folder / name, links=False) as file:
                for chunk, item in wanted:
                    dtype = DTYPES[self._index[item.storage_index.fqn].dtype]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_read(file, chunk, dtype, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


class Planner(DefaultLoadPlanner):
    """Plans what a rank reads. Raises RefusedError if a tensor of the run is missing in the checkpoint, or has another
    shape there."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, tensor in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise RefusedError(f"it has no tensor {name}")
            if entry.size != tensor.size():
                raise RefusedError(
                    f"its {name} has the shape {list(entry.size)}, the layout's has {list(tensor.size())}"
                )
        return super().create_local_plan()


def _stored(name: str, entry: Any, places: dict[MetadataIndex, _At]) -> Stored:
    """Create the index entry of a saved tensor. Empty shards are not stored."""
    chunks = []
    for chunk in entry.chunks:
        if math.prod(chunk.sizes):
            at = places[MetadataIndex(name, chunk.offsets)]
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), at.file, at.offset))
    return Stored(NAMES[entry.properties.dtype], tuple(entry.size), chunks)


def _entry(stored: Stored) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks]
    return TensorStorageMetadata(TensorProperties(DTYPES[stored.dtype]), torch.Size(stored.shape), boxes)


def bytes_of(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """The tensor's bytes as an array that shares the tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _read(
    file: FileIO, chunk: Chunk, dtype: torch.dtype, offsets: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """Read a box of a chunk, which begins at `offsets` in the chunk, into a newly allocated tensor of shape `lengths`.
    Only the bytes of the box are read, except where this would need reads of less than `LEAST_RUN` bytes. The size of
    the chunk is bounded, because the index has been checked."""
    sizes, item = chunk.sizes, dtype.itemsize
    strides = [math.prod(sizes[dim + 1 :]) * item for dim in range(len(sizes))]
    # The box has all elements of the dims after `last`, so these are contiguous in the file, and so are the
    # `lengths[last]` slices along `last`.
    last = max((dim for dim, size in enumerate(sizes) if lengths[dim] < size), default=0)
    run = math.prod(lengths[last:]) * item
    outer = [
        range(0, length * stride, stride) for length, stride in zip(lengths[:last], strides, strict=False)
    ]
    if run < LEAST_RUN and math.prod(map(len, outer)) > 1:
        wider = _read(file, chunk, dtype, _with(offsets, last, 0), _with(lengths, last, sizes[last]))
        return wider.narrow(last, offsets[last], lengths[last])
    box = torch.empty(tuple(lengths), dtype=dtype)
    view, done = bytes_of(box).data, 0
    first = chunk.at + sum(map(mul, offsets, strides))
    for steps in product(*outer):
        _fill(file, chunk, view[done : done + run], first + sum(steps))
        done += run
    return box


def _fill(file: FileIO, chunk: Chunk, rest: memoryview, at: int) -> None:
    while len(rest):
        count = os.preadv(file.fileno(), [rest], at)
        if not count:
            raise OSError(0, "the file is too short", chunk.file)
        rest, at = rest[count:], at + count


def _with(numbers: Sequence[int], dim: int, number: int) -> list[int]:
    return [*numbers[:dim], number, *numbers[dim + 1 :]]


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def read_tensor(folder: Path, index: Index, name: str) -> Tensor:
    """One whole tensor of the checkpoint in `folder`, assembled from the parts that the ranks wrote. The index must
    have been checked (`read_index`)."""
    stored = index[name]
    whole = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    for chunk in stored.chunks:
        with open_ordinary(folder / chunk.file, links=False) as file:
            part = whole
            for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
                part = part.narrow(dim, offset, length)
            part.copy_(_read(file, chunk, whole.dtype, (0,) * len(chunk.sizes), chunk.sizes))
    return whole


def first_line(error: BaseException) -> str:
    """The first line of an error message or, if torch has collected the errors of several ranks, the error of one of
    them.
    """
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {cause}"
    return str(error).partition("\n")[0] or type(error).__name__
