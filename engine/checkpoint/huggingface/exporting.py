"""Writes a checkpoint, saved in any layout, as a Hugging Face folder: `config.json` and safetensors files.

An export holds at most one file of up to SHARD_BYTES in memory, or one tensor if the tensor is larger.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.huggingface.architectures import ARCHITECTURES, PREDICTS, config_of
from engine.checkpoint.huggingface.importing import CONFIG, SHARDS, SINGLE
from engine.checkpoint.huggingface.tensors import Entry, entries
from engine.checkpoint.manifest import PARTIAL, Checkpoint
from engine.checkpoint.reading import newest_checkpoint
from engine.checkpoint.storage import read_tensor
from engine.checkpoint.tensor_index import Index, read_index
from engine.config.refusal import RefusedError

SHARD_BYTES = 2**31
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Exported:
    """What an export has written: the folder, its architecture and its size. `mtp_layers`: number of multi-token
    prediction layers that were not exported."""

    folder: Path
    checkpoint: Path
    architecture: str
    parameters: int
    bytes: int
    files: int
    mtp_layers: int = 0


def export_checkpoint(source: Path, target: Path, dtype: str, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Export a checkpoint to the new folder `target`. `source` is a checkpoint, a run's folder, or a folder of
    checkpoints; if there are several checkpoints, the newest is exported. If the export fails, RefusedError is raised
    and nothing is left at `target`."""
    checkpoint = newest_checkpoint(source)
    model, files = checkpoint.manifest.layout.model, checkpoint.manifest.files
    config = config_of(model, str(DTYPES[dtype]).removeprefix("torch."), checkpoint.manifest.huggingface)
    index = read_index(checkpoint.folder, files)
    wanted = []
    # Stops at the first missing tensor: a manifest may claim more tensors than fit into memory.
    for entry in entries(model, config["model_type"]):
        if _unbiased(checkpoint, index, entry):
            continue
        if f"model.{entry.ours}" not in index:
            raise RefusedError(f"{checkpoint.folder} lacks the tensor model.{entry.ours}")
        shape = index[f"model.{entry.ours}"].shape
        if prod(shape) != prod(entry.shape):
            raise RefusedError(f"{checkpoint.folder}: model.{entry.ours} has the shape {list(shape)}")
        wanted.append(entry)
    if target.exists():
        raise RefusedError(f"{target} already exists; legal: a new folder")
    partial = target.with_name(f".{target.name}{PARTIAL}")
    try:
        partial.mkdir(parents=True)
        count, size = _write(checkpoint, index, wanted, partial, DTYPES[dtype], shard_bytes)
        (partial / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        partial.rename(target)
    except OSError as error:
        raise RefusedError(f"cannot write to {target}: {error.strerror}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    parameters = sum(prod(entry.shape) for entry in wanted if not entry.copy)
    name = ARCHITECTURES[config["model_type"]].name
    left_out = 0 if config["model_type"] in PREDICTS else model.mtp_layers
    return Exported(target, checkpoint.folder, name, parameters, size, count, left_out)


def _unbiased(checkpoint: Checkpoint, index: Index, entry: Entry) -> bool:
    """Whether to leave this tensor out of the export: True for the engine's expert-selection bias if the Hugging Face
    architecture has no such bias. Raises RefusedError if the bias is not 0, because the exported model would then
    choose other experts.
    """
    name = f"model.{entry.ours}"
    if entry.copy or not entry.optional or name not in index:
        return entry.optional and not entry.copy
    if read_tensor(checkpoint.folder, index, name).count_nonzero():
        raise RefusedError(
            f"{checkpoint.folder}: {name} is not 0, and this architecture has no bias on expert selection; "
            "legal: a model that was trained with model.moe.balance = aux or none"
        )
    return True


def _write(
    checkpoint: Checkpoint,
    index: Index,
    wanted: list[Entry],
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
) -> tuple[int, int]:
    """Write the safetensors files, and their index if there are several. Returns the number of files and the number of
    bytes."""
    from safetensors.torch import save_file

    shards = list(_shards(wanted, dtype, shard_bytes))
    places, size = {}, 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for entry in shard:
            tensor = read_tensor(checkpoint.folder, index, f"model.{entry.ours}")
            # transformers stores the bias in fp32.
            own = torch.float32 if entry.ours.endswith("router.bias") else dtype
            tensors[entry.theirs] = written = entry.to_theirs(tensor).to(own).contiguous()
            if not written.isfinite().all():
                raise RefusedError(
                    f"{checkpoint.folder}: model.{entry.ours} has a weight that is not finite in {own}; legal: a "
                    "checkpoint with finite weights, and a dtype that can represent them"
                )
            size += tensors[entry.theirs].nbytes
            places[entry.theirs] = name
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if len(shards) > 1:
        whole = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / SHARDS).write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
    return len(shards), size


def _shards(wanted: list[Entry], dtype: torch.dtype, most: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    size = 0
    for entry in wanted:
        more = prod(entry.shape) * dtype.itemsize
        if shard and size + more > most:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += more
    yield shard
