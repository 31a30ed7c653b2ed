"""Reads a Hugging Face folder (`config.json` and safetensors) and writes a checkpoint that contains only weights.

Tensors are read and written one by one, so only the largest tensor must fit into memory. The folder is untrusted:
nothing in it is unpickled, file names may not contain folders, and every tensor is checked before any is written.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from agents.rundir.bounded_read import check_ordinary, read_ordinary
from engine.checkpoint.huggingface.architectures import (
    PREDICTIONS,
    PREDICTS,
    Config,
    architecture_of,
    model_of,
)
from engine.checkpoint.huggingface.tensors import Entry, entries
from engine.checkpoint.manifest import PARTIAL, Manifest, folder_name
from engine.checkpoint.storage import NAMES, bytes_of
from engine.checkpoint.tensor_index import INDEX, Chunk, Index, Stored, write_index
from engine.checkpoint.writing import seal
from engine.config.layout import Layout
from engine.config.refusal import OWN_MODEL, RefusedError, shown
from engine.config.sections.model import Model
from engine.config.sections.run import Run
from engine.config.toml import from_toml, to_toml, write_layout

CONFIG, SINGLE, SHARDS = "config.json", "model.safetensors", "model.safetensors.index.json"
MAX_CONFIG_BYTES, MAX_INDEX_BYTES = 2**20, 2**28
HEAD = "lm_head.weight"
ROWS_BYTES = 2**26  # the head and the embedding are compared in parts of this size
FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\.safetensors")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LEFT_OUT = ".rotary_emb.inv_freq"  # suffix of tensors in old releases that can be computed from the config
FROM_HUGGING_FACE = "rank-0.bin"


@dataclass(frozen=True)
class Imported:
    """The result of an import: a folder with `layout.toml` and `checkpoints/step-0`."""

    folder: Path
    architecture: str
    tensors: int
    parameters: int
    bytes: int
    # Names of source tensors that the model does not have, such as those of multi-token prediction.
    left_out: list[str]
    # Whether tie_word_embeddings is true although the head has weights of its own, which are then used.
    untied: bool = False


def import_folder(source: Path, target: Path, overrides: list[str]) -> Imported:
    """Import the model in the folder `source` into the new folder `target`. `overrides` set keys of the new layout, as
    in ``model.seq_len=2048``. If the folder cannot be imported, RefusedError is raised and nothing is left at `target`.
    """
    config = read_config(source)
    kind, architecture = architecture_of(config, str(source / CONFIG))
    model = model_of(config, str(source / CONFIG))
    with Weights(source) as weights:
        untied = model.tie_embeddings and weights.untied(entries(model, kind))
        if untied:
            model = structs.replace(model, tie_embeddings=False)
        layout = _layout(model, source, overrides)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise RefusedError(f"{target} already exists; legal: a new folder")
        wanted, left_out = weights.check(entries(layout.model, kind), layout.model.layers)
        if kind in PREDICTS and any(name.startswith(f"model.layers.{model.layers}.") for name in left_out):
            config = {key: value for key, value in config.items() if key not in PREDICTIONS}
            config[PREDICTIONS[0]] = 0
        wanted = weights.without_copies(wanted)
        folder, existed = target / "checkpoints", target.exists()
        partial = folder / f"{folder_name(0)}{PARTIAL}"
        try:
            partial.mkdir(parents=True)
            index, total = _write(weights, wanted, partial / FROM_HUGGING_FACE)
            raw = write_index(index)
            (partial / INDEX).write_bytes(raw)
            manifest = Manifest(
                step=0,
                run=layout.run.name,
                layout=layout,
                data=None,
                weights_only=True,
                knobs={},
                revision=0,
                history=[],
                torch=str(torch.__version__),
                huggingface=config,
            )
            sealed = seal(partial, manifest, {FROM_HUGGING_FACE: total, INDEX: zlib.crc32(raw)})
            write_layout(layout, target)
        except BaseException as error:
            shutil.rmtree(folder if existed else target, ignore_errors=True)
            if isinstance(error, OSError):
                raise RefusedError(f"cannot write to {target}: {error.strerror}") from None
            raise
    count = sum(_size(entry) for entry in wanted)
    size = sum(sealed.manifest.files.values())
    return Imported(target, architecture.name, len(wanted), count, size, left_out, untied)


def read_config(source: Path) -> Config:
    """The content of a folder's config.json. Raises RefusedError."""
    path = source / CONFIG

    def number(text: str) -> float:
        value = float(text)
        if not isfinite(value):
            raise ValueError(f"{shown(text)} is not a legal number")
        if text.lstrip("-").isdigit():
            if abs(value) >= 2**63:
                raise ValueError(f"a number of {len(text)} digits is not legal")
            return int(text)
        return value

    try:
        raw = read_ordinary(path, MAX_CONFIG_BYTES)
        config = json.loads(raw, parse_int=number, parse_float=number, parse_constant=number)
        # A manifest contains the config, so msgspec has to be able to write and read it.
        msgspec.json.decode(msgspec.json.encode([[[config]]]))
    except OSError as error:
        raise RefusedError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RefusedError(f"{path} is not JSON: {str(error)[:200]}") from None
    if not isinstance(config, dict):
        raise RefusedError(f"{path} is not a JSON object")
    return config


def _layout(model: Model, source: Path, overrides: list[str]) -> Layout:
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", source.resolve().name).lstrip(".-")[:64] or "imported"
    layout = from_toml(to_toml(Layout(model=model, run=Run(name=name))), overrides, str(source / CONFIG))
    if layout.model.own:
        raise RefusedError(OWN_MODEL.format(layout.model.implementation, "engine import-hf"))
    if layout.model.max_seq_len != model.max_seq_len:
        raise RefusedError(
            f"model.max_seq_len = {shown(layout.model.max_seq_len)} is not the sliding window of {source / CONFIG}; "
            f"legal: {model.max_seq_len or 'none'}"
        )
    return layout


class Weights:
    """The tensors in the safetensors files of a folder. A context manager that keeps the files open."""

    def __init__(self, source: Path):
        self._source, self._files = source, ExitStack()
        self._open: dict[str, Any] = {}
        self.file_of = self._places()

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def _places(self) -> dict[str, str]:
        """For each tensor name, the file that contains the tensor. Like transformers, reads no index beside a single
        file, and all tensors of the files that an index lists."""
        if (self._source / SINGLE).exists():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        if not (self._source / SHARDS).exists():
            raise RefusedError(
                f"{self._source} has no safetensors; legal: {SINGLE}, or {SHARDS} and its files"
            )
        path = self._source / SHARDS
        try:
            index = json.loads(read_ordinary(path, MAX_INDEX_BYTES))
            places = msgspec.convert(index["weight_map"], dict[str, str])
        except OSError as error:
            raise RefusedError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError, KeyError, TypeError, msgspec.ValidationError):
            raise RefusedError(
                f"{path} is not a safetensors index: it has no weight_map of tensor names to files"
            ) from None
        for file in set(places.values()):
            if not FILE.fullmatch(file):
                raise RefusedError(
                    f"{path} names the file {shown(file)}; legal: a file of that folder, such as {SINGLE}"
                )
        for name, file in places.items():
            if name not in self._file(file).keys():  # noqa: SIM118 - not a dict
                raise RefusedError(
                    f"{self._source / file} lacks the tensor {shown(name)}, although {SHARDS} lists it"
                )
        for file in self._open:
            for name in self._file(file).keys():  # noqa: SIM118 - not a dict
                if places.get(name) != file:
                    raise RefusedError(
                        f"{self._source / file} has the tensor {shown(name)}, which {SHARDS} does not list there"
                    )
        return places

    def _file(self, name: str) -> Any:
        if name not in self._open:
            from safetensors import SafetensorError, safe_open

            path = self._source / name
            try:
                check_ordinary(path)
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except OSError as error:
                why = error.strerror or "it does not exist"
                raise RefusedError(f"cannot read {path}: {why}") from None
            except SafetensorError as error:
                raise RefusedError(f"{path} is not a safetensors file: {str(error)[:200]}") from None
            self._open[name] = _Named(file)
        return self._open[name]

    def untied(self, wanted: Iterable[Entry]) -> bool:
        """Whether the folder has a head that differs from the embedding, the first entry of `wanted`. transformers then
        uses both, even if config.json says that they share their weights."""
        embedding = next(iter(wanted))
        if not {HEAD, embedding.theirs} <= self.file_of.keys():
            return False
        parts = [self._part(entry) for entry in (embedding, replace(embedding, theirs=HEAD))]
        rows = max(1, ROWS_BYTES // (8 * embedding.shape[1]))
        return not all(
            torch.equal(*(part[at : at + rows].double() for part in parts))
            for at in range(0, embedding.shape[0], rows)
        )

    def _part(self, entry: Entry) -> Any:
        """The tensor of `entry`, not yet read. Raises RefusedError if it has another shape, or a dtype that the engine
        does not read."""
        part = self._file(self.file_of[entry.theirs]).slice(entry.theirs)
        if tuple(part.get_shape()) != entry.shape:
            raise RefusedError(
                f"{self._source}: {entry.theirs} has the shape {list(part.get_shape())}, but {CONFIG} "
                f"implies {list(entry.shape)}"
            )
        if part.get_dtype() not in DTYPES:
            raise RefusedError(
                f"{self._source}: {entry.theirs} has the dtype {part.get_dtype()}; legal: {', '.join(DTYPES)}"
            )
        return part

    def check(self, entries: Iterable[Entry], layers: int) -> tuple[list[Entry], list[str]]:
        """Check that the folder has every tensor of `entries`, with the expected shape and a dtype that the engine
        reads. Returns `entries` as a list, and the names of tensors that are not imported. Stops at the first missing
        tensor, so that the work is bounded by the tensors in the files, whatever config.json claims. Raises
        RefusedError."""
        wanted: list[Entry] = []
        for entry in entries:
            if entry.theirs in self.file_of:
                self._part(entry)
            elif not entry.optional:
                raise RefusedError(f"{self._source} lacks the tensor {entry.theirs}")
            wanted.append(entry)
        known = {entry.theirs for entry in wanted} | {HEAD}
        left_out, beyond = [], re.compile(r"model\.layers\.(\d{1,6})\.")
        for name in self.file_of.keys() - known:
            at = beyond.match(name)
            if not name.endswith(LEFT_OUT) and not (at and int(at[1]) >= layers):
                raise RefusedError(
                    f"{self._source} has the tensor {shown(name)}, which the model of {CONFIG} does not have"
                )
            left_out.append(name)
        return wanted, sorted(left_out)

    def without_copies(self, wanted: list[Entry]) -> list[Entry]:
        """`wanted` without the entries for second copies of a tensor (`Entry.copy`). Raises RefusedError if a copy
        differs from the tensor that it repeats."""
        read = {entry.ours: entry for entry in wanted if not entry.copy}
        for entry in wanted:
            original = read[entry.ours]
            there = entry.copy and entry.theirs in self.file_of
            if there and not torch.equal(self.read(entry), self.read(original)):
                raise RefusedError(
                    f"{self._source}: {entry.theirs} differs from {original.theirs}; legal: equal tensors, because the "
                    "engine shares them"
                )
        return list(read.values())

    def read(self, entry: Entry) -> Tensor:
        """Read one tensor, and convert it to the order of dimensions and rows that the engine uses."""
        if entry.theirs not in self.file_of:
            return torch.zeros(entry.shape)
        tensor: Tensor = self._file(self.file_of[entry.theirs]).read(entry.theirs)
        if not tensor.isfinite().all():
            raise RefusedError(
                f"{self._source}: {entry.theirs} has NaN or infinite weights; legal: finite ones"
            )
        return entry.to_ours(tensor).contiguous()


class _Named:
    """An open safetensors file and the names of its tensors."""

    def __init__(self, file: Any):
        self._file, self._names = file, set(file.keys())

    def keys(self) -> set[str]:
        return self._names

    def slice(self, name: str) -> Any:
        return self._file.get_slice(name)

    def read(self, name: str) -> Any:
        return self._file.get_tensor(name)


def _write(weights: Weights, wanted: list[Entry], path: Path) -> tuple[Index, int]:
    """Write the tensors one after the other, and return their index and the checksum of the file."""
    index: Index = {}
    total = at = 0
    with path.open("xb") as file:
        for entry in wanted:
            tensor = weights.read(entry)
            raw = bytes_of(tensor)
            file.write(raw.data)
            total = zlib.crc32(raw.data, total)
            shape = tuple(tensor.shape)
            chunk = Chunk((0,) * len(shape), shape, path.name, at)
            index[f"model.{entry.ours}"] = Stored(NAMES[tensor.dtype], shape, [chunk])
            at += raw.nbytes
        file.flush()
        os.fsync(file.fileno())
    return index, total


def _size(entry: Entry) -> int:
    size = 1
    for length in entry.shape:
        size *= length
    return size
