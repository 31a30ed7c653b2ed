"""Finds checkpoints on disk and checks that they are complete and undamaged. This module does not import torch, so it
is fast to import.

A checkpoint is first written under a temporary name (`step-5.partial`). The manifest is written last, then the folder
is renamed. So if a folder has a manifest, the checkpoint was complete when it was written. The file sizes in the
manifest show whether the checkpoint is still complete. The checksums show whether the checkpoint is undamaged, but
verifying them means reading all files.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from agents.rundir.bounded_read import open_ordinary, read_ordinary
from engine.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    MANIFEST_SUM,
    OLD,
    Checkpoint,
    Format,
    IncompleteError,
    Manifest,
    OtherFormatError,
    manifest_sum,
)
from engine.checkpoint.tensor_index import INDEX, read_index
from engine.config.refusal import RefusedError

CHUNK = 4 * 2**20  # bytes read at once
MAX_MANIFEST_BYTES = 2**26
_NAME = re.compile(rf"step-(\d{{1,16}})(?:{re.escape(OLD)})?")


def is_checkpoint_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    found = _NAME.fullmatch(folder.name)
    assert found, folder
    return int(found[1])


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; its tensors are not read. Raises IncompleteError if the checkpoint is incomplete or
    has another format."""
    try:
        raw = read_ordinary(folder / MANIFEST, MAX_MANIFEST_BYTES, links=False)
    except OSError as error:
        raise IncompleteError(
            f"{folder} is not a complete checkpoint: {MANIFEST}: {error.strerror}"
        ) from None
    try:
        found_format = msgspec.json.decode(raw, type=Format).format
        if found_format != FORMAT:
            raise OtherFormatError(f"{folder} has format {found_format}, and this engine reads {FORMAT}")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IncompleteError(
            f"{folder} is not a complete checkpoint: {MANIFEST} cannot be read: {error}"
        ) from None
    for name, size in manifest.files.items():
        found = _size(folder / name)
        if found != size:
            raise IncompleteError(
                f"{folder} is not a complete checkpoint: {name} has {found} of {size} bytes"
            )
    if not manifest.files.keys() == manifest.sums.keys() >= {INDEX}:
        raise IncompleteError(f"{folder} is damaged: {MANIFEST} lacks files or their checksums")
    try:
        written_sum = read_ordinary(folder / MANIFEST_SUM, 64, links=False)
    except OSError as error:
        raise IncompleteError(
            f"{folder} is not a complete checkpoint: {MANIFEST_SUM}: {error.strerror}"
        ) from None
    if written_sum != manifest_sum(raw):
        raise IncompleteError(f"{folder} is damaged: {MANIFEST} has changed since it was written")
    return Checkpoint(folder, manifest)


def changed_files(folder: Path, sums: dict[str, int]) -> list[str]:
    """The files in `folder` whose checksum is not that in `sums`, or which cannot be read.

    Reads the files in several threads. `zlib.crc32` releases the GIL, so the threads run in parallel, and the disk is
    the bottleneck.
    """
    with ThreadPoolExecutor() as readers:
        found = readers.map(lambda name: _checksum_or_none(folder / name), sums)
        return [name for name, now in zip(sums, found, strict=True) if now != sums[name]]


def damage(
    folder: Path, changed_files: Callable[[Path, dict[str, int]], list[str]] = changed_files
) -> str | None:
    """One sentence that describes the damage to the checkpoint in `folder`, or None if the checkpoint is intact. Reads
    all files, or lets `changed_files` read them."""
    manifest = read(folder).manifest
    damaged = changed_files(folder, manifest.sums)
    if damaged:
        return f"{folder} is damaged: {damaged[0]} has changed since it was written"
    try:
        read_index(folder, manifest.files)
    except RefusedError as why:
        return str(why)
    return None


def checksum(path: Path) -> int:
    """CRC-32 of a file's content. A CRC detects accidental damage such as a flipped bit, but does not protect against
    deliberate changes."""
    value = 0
    with open_ordinary(path, links=False) as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _checksum_or_none(path: Path) -> int | None:
    try:
        return checksum(path)
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def complete_checkpoints(
    checkpoints_dir: Path, on_incomplete: Callable[[str], None] = lambda _: None
) -> list[Checkpoint]:
    """The complete checkpoints in a folder, in the order in which they were saved. `on_incomplete` is called with a
    one-sentence message for each incomplete checkpoint.

    A checkpoint that was saved later may have a lower step number, if the run was resumed from an earlier step.
    """
    found = []
    for folder in checkpoint_folders(checkpoints_dir):
        try:
            found.append(read(folder))
        except IncompleteError as why:
            on_incomplete(str(why))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.serial)


def newest_checkpoint(source: Path) -> Checkpoint:
    """The newest complete and undamaged checkpoint at `source`, which is a checkpoint, a folder of checkpoints, or a
    run's folder."""
    incomplete: list[str] = []
    found = complete_checkpoints(source, incomplete.append) or complete_checkpoints(
        source / "checkpoints", incomplete.append
    )
    for checkpoint in reversed(found):
        if damage(checkpoint.folder) is None:
            return checkpoint
    try:
        checkpoint = read(source)
    except IncompleteError as error:
        why = (
            f"every checkpoint in {source} is damaged"
            if found
            else f"there is no complete checkpoint in {source}"
        )
        if is_checkpoint_name(source.name) and source.is_dir():
            why = str(error)
        elif incomplete:
            why += f" ({incomplete[-1]})"
        raise RefusedError(f"{why}; legal: a checkpoint, or the folder of a run with one") from None
    if damaged := damage(source):
        raise RefusedError(damaged)
    return checkpoint


def checkpoint_folders(checkpoints_dir: Path) -> Iterator[Path]:
    """All folders that are named like a checkpoint, whether the checkpoint is complete or not."""
    with suppress(OSError):
        yield from (
            path
            for path in sorted(checkpoints_dir.iterdir())
            if is_checkpoint_name(path.name) and path.is_dir()
        )


def other_format_folders(checkpoints_dir: Path) -> list[Path]:
    """Folders of checkpoints in the format of another engine version. The engine neither resumes from such checkpoints
    nor removes them."""
    return [folder for folder in checkpoint_folders(checkpoints_dir) if has_other_format(folder)]


def has_other_format(folder: Path) -> bool:
    try:
        read(folder)
    except OtherFormatError:
        return True
    except IncompleteError:
        return False
    return False
