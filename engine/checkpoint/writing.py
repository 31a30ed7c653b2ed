"""Completes checkpoints on disk and removes old ones. Torch-free."""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from engine.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_SUM,
    OLD,
    PARTIAL,
    Checkpoint,
    Manifest,
    folder_name,
    manifest_sum,
)
from engine.checkpoint.reading import (
    checkpoint_folders,
    checksum,
    complete_checkpoints,
    has_other_format,
    step_of,
)


def seal(partial: Path, manifest: Manifest, sums: Mapping[str, int] | None = None) -> Checkpoint:
    """Turn the files in the folder `partial` into a checkpoint. A rename at the end makes this atomic: if the machine
    fails before the rename, the folder does not count as a checkpoint.

    If there already is a checkpoint of this step, it is first renamed to ``step-N.old``, under which it still counts as
    a checkpoint, and it is removed after the rename. So at every moment one of the two can be found.

    `sums` maps file names to checksums that are already known; for all other files, the checksum is computed from the
    file.
    """
    checkpoints_dir = partial.parent
    folder = checkpoints_dir / folder_name(manifest.step)
    serials = [checkpoint.manifest.serial for checkpoint in complete_checkpoints(checkpoints_dir)]
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    known = sums or {}
    all_sums = {name: known[name] if name in known else checksum(partial / name) for name in sizes}
    manifest = msgspec.structs.replace(
        manifest, serial=max(serials, default=0) + 1, files=sizes, sums=all_sums
    )
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    _write(partial / MANIFEST_SUM, manifest_sum(raw))
    _write(partial / MANIFEST, raw)
    _sync(partial)
    replaced = folder.with_name(folder.name + OLD)
    if folder.exists():  # the run was resumed from an older checkpoint and saves this step again
        remove(replaced)  # of a save that was killed after its last rename
        folder.rename(replaced)
    partial.rename(folder)
    _sync(checkpoints_dir)
    remove(replaced)
    return Checkpoint(folder, manifest)


def _write(path: Path, content: bytes) -> None:
    """Write a new file and sync it to the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Sync a folder to the disk, because syncing a file does not persist its directory entry."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(checkpoints_dir: Path, keep: int) -> None:
    """Remove all complete checkpoints except the `keep` newest ones. Also remove incomplete checkpoints whose step is
    below the lowest step that is kept. Checkpoints in other formats are not removed."""
    checkpoints = complete_checkpoints(checkpoints_dir)
    kept = checkpoints[-keep:]
    for checkpoint in checkpoints[:-keep]:
        remove(checkpoint.folder)
    first = min((checkpoint.manifest.step for checkpoint in kept), default=0)
    for folder in set(checkpoint_folders(checkpoints_dir)) - {checkpoint.folder for checkpoint in kept}:
        if step_of(folder) < first and not has_other_format(folder):
            remove(folder)


def remove_partial(checkpoints_dir: Path) -> None:
    """Remove the files of interrupted saves. Call this only while no other process saves to the folder."""
    with suppress(OSError):
        for path in checkpoints_dir.glob(f"step-*{PARTIAL}"):
            remove(path)


def remove(folder: Path) -> None:
    """Remove a checkpoint. The manifest is removed first, so a partly removed checkpoint does not count as complete."""
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
