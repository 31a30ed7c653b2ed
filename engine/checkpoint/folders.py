"""Checkpoints on disk: which are whole, which is the newest, which are too many. Torch-free, so that refusing is quick.

The checkpoints of a run are in one folder; docs/checkpoints.md lists the files of a checkpoint. A checkpoint is first
written under a temporary name (`step-5.partial`); the manifest is written last, and then the folder is renamed. So a
folder with a manifest was complete once. The sizes in the manifest show whether it still is; the checksums, which
need a read of all files, show whether it is undamaged.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.protocol import Changes
from agents.rundir.bounded_read import open_ordinary, read_ordinary
from agents.rundir.runs import RunError
from engine.checkpoint.tensor_index import INDEX, FileName, Natural, read_index
from engine.config.layout import Digest, Layout
from engine.config.refusal import RefusedError

FORMAT = 2  # 1 had a pickle as its index, which is not read
MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.crc32"  # of the manifest's bytes, in hexadecimal
PARTIAL = ".partial"
LOCK = ".lock"  # in a run's folder and on its shelf: held by the run; in it, who that is
HOLD_S = (
    3.0  # how long a run is waited for that still holds a folder: one that was killed takes a moment to go
)
CHUNK = 4 * 2**20  # bytes read at once
MOST_BYTES = 2**26  # of a manifest
_NAME = re.compile(r"step-\d+")


class IncompleteError(RefusedError):
    """Why a folder is not a whole checkpoint: one sentence."""


class OtherFormatError(IncompleteError):
    """It may well be whole, for another version of the engine."""


class Applied(Struct, frozen=True):
    """One revision of the knobs, in force from `step` on."""

    revision: Natural
    step: Natural
    changes: Changes


class Manifest(Struct, frozen=True, kw_only=True):
    """What a checkpoint says of itself."""

    format: int = FORMAT
    serial: Natural = 0  # larger than that of every checkpoint that lay on the shelf when it was saved
    step: Natural  # steps done; also the first step that a run continued from here trains
    run: str
    layout: Layout  # as it was given: without what operators have turned
    data: Digest  # of the text that it was trained on
    knobs: Changes
    revision: Natural
    history: list[Applied]
    torch: str
    files: dict[FileName, Natural] = {}  # name -> bytes
    sums: dict[FileName, Natural] = {}  # name -> CRC-32 of the content


class _Format(Struct):
    format: int


@dataclass(frozen=True)
class Checkpoint:
    """A whole one."""

    folder: Path
    manifest: Manifest


def checkpoints_folder(layout: Layout, run_dir: Path) -> Path:
    """Where the run with that folder keeps its checkpoints."""
    return Path(layout.checkpoint.dir) / run_dir.name if layout.checkpoint.dir else run_dir / "checkpoints"


def name_of(step: int) -> str:
    return f"step-{step}"


def is_named_so(folder: Path) -> bool:
    """Whether it has the name that checkpoints have."""
    return _NAME.fullmatch(folder.name) is not None


@contextmanager
def hold(
    folder: Path, patience_s: float = HOLD_S, told: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Keep other runs off a run's folder or its shelf, which is made if need be; RunError, one sentence, where that
    cannot be.

    The kernel lets go of it when the last process of the run has died, however it did: processes that are forked
    meanwhile hold it too. `told` hears, in a sentence, that this file system has no locks.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+")
    except OSError as error:
        raise RunError(f"nothing can be saved in {folder}: {error.strerror}") from None
    with lock:
        end = time.monotonic() + patience_s
        while not _locked(lock.fileno(), folder, told):
            if time.monotonic() >= end:
                lock.seek(0)
                who = lock.read().strip() or "another process"
                raise RunError(
                    f"{folder} is in use by {who}, a run that is still alive; end it first, "
                    "or choose another folder with --run-dir"
                )
            time.sleep(0.05)
        with suppress(OSError):  # a full disk keeps the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        yield


def _locked(descriptor: int, folder: Path, told: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        told(f"the file system of {folder} has no locks ({error.strerror}), so keep other runs off it")
    return True


def read(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`; TornError if it is not whole or not of this format."""
    try:
        raw = read_ordinary(folder / MANIFEST, MOST_BYTES, links=False)
    except OSError as error:
        raise IncompleteError(f"{folder} is not a whole checkpoint: {MANIFEST}: {error.strerror}") from None
    try:
        written_in = msgspec.json.decode(raw, type=_Format).format
        if written_in != FORMAT:
            raise OtherFormatError(
                f"{folder} is written in format {written_in}, and this engine reads {FORMAT}"
            )
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IncompleteError(
            f"{folder} is not a whole checkpoint: {MANIFEST} cannot be read: {error}"
        ) from None
    for name, size in manifest.files.items():
        found = _size(folder / name)
        if found != size:
            raise IncompleteError(f"{folder} is not a whole checkpoint: {name} has {found} of {size} bytes")
    if not manifest.files.keys() == manifest.sums.keys() >= {INDEX}:
        raise IncompleteError(f"{folder} is damaged: {MANIFEST} lacks files or their checksums")
    try:
        written = read_ordinary(folder / MANIFEST_SUM, 64, links=False)
    except OSError as error:
        raise IncompleteError(
            f"{folder} is not a whole checkpoint: {MANIFEST_SUM}: {error.strerror}"
        ) from None
    if written != _manifest_sum(raw):
        raise IncompleteError(f"{folder} is damaged: {MANIFEST} is not what was written")
    return Checkpoint(folder, manifest)


def damage(folder: Path) -> str | None:
    """One sentence on why the content of the checkpoint in `folder` must not be used, or None.

    Reads all files at the speed of the disk: checksums run without the interpreter lock.
    """
    manifest = read(folder).manifest
    sums = manifest.sums
    with ThreadPoolExecutor() as readers:
        found = readers.map(lambda name: _sum_or_none(folder / name), sums)
        spoiled = [name for name, now in zip(sums, found, strict=True) if now != sums[name]]
    if spoiled:
        return f"{folder} is damaged: {spoiled[0]} is not what was written"
    try:
        read_index(folder, manifest.files)
    except RefusedError as why:
        return str(why)
    return None


def checksum(path: Path) -> int:
    """CRC-32 of a file's content: it finds accidents, any flipped bit among them, and is no protection from malice."""
    value = 0
    with open_ordinary(path, links=False) as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def _sum_or_none(path: Path) -> int | None:
    try:
        return checksum(path)
    except OSError:
        return None


def _manifest_sum(raw: bytes) -> bytes:
    return b"%08x\n" % zlib.crc32(raw)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def whole(checkpoints_dir: Path, torn: Callable[[str], None] = lambda _: None) -> list[Checkpoint]:
    """The whole checkpoints on a shelf, oldest first; `torn` is told of each that is not, in a sentence.

    The newest is the one saved last, not the one with most steps: a run continued from an older checkpoint has left the
    younger ones' future.
    """
    found = []
    for folder in _folders(checkpoints_dir):
        try:
            found.append(read(folder))
        except IncompleteError as why:
            torn(str(why))
    return sorted(found, key=lambda checkpoint: checkpoint.manifest.serial)


def _folders(checkpoints_dir: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (
            path for path in sorted(checkpoints_dir.iterdir()) if _NAME.fullmatch(path.name) and path.is_dir()
        )


def foreign(checkpoints_dir: Path) -> list[Path]:
    """What lies there in a format of another version of the engine: nothing to go on from, and not ours to remove."""
    return [folder for folder in _folders(checkpoints_dir) if _is_foreign(folder)]


def _is_foreign(folder: Path) -> bool:
    try:
        read(folder)
    except OtherFormatError:
        return True
    except IncompleteError:
        return False
    return False


def seal(partial: Path, manifest: Manifest, sums: Mapping[str, int] | None = None) -> Checkpoint:
    """Make what was written into `partial` a checkpoint: all of it, or, if the machine dies meanwhile, none of it.

    `sums` are the checksums that are known already; other files are read for theirs.
    """
    checkpoints_dir = partial.parent
    folder = checkpoints_dir / name_of(manifest.step)
    serials = [checkpoint.manifest.serial for checkpoint in whole(checkpoints_dir)]
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    known = sums or {}
    all_sums = {name: known[name] if name in known else checksum(partial / name) for name in sizes}
    manifest = msgspec.structs.replace(
        manifest, serial=max(serials, default=0) + 1, files=sizes, sums=all_sums
    )
    raw = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    _write(partial / MANIFEST_SUM, _manifest_sum(raw))
    _write(partial / MANIFEST, raw)
    _sync(partial)
    aside = folder.with_name(f"{folder.name}.old{PARTIAL}")
    if folder.exists():  # of a future that was left
        folder.rename(aside)
    partial.rename(folder)
    _sync(checkpoints_dir)
    shutil.rmtree(aside, ignore_errors=True)
    return Checkpoint(folder, manifest)


def _write(path: Path, content: bytes) -> None:
    """A new file, on the disk when it returns."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Names reach the disk with their folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(checkpoints_dir: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole checkpoints, and torn ones with fewer steps than those."""
    checkpoints = whole(checkpoints_dir)
    kept = checkpoints[-keep:]
    for checkpoint in checkpoints[:-keep]:
        remove(checkpoint.folder)
    first = min((checkpoint.manifest.step for checkpoint in kept), default=0)
    for folder in set(_folders(checkpoints_dir)) - {checkpoint.folder for checkpoint in kept}:
        if int(folder.name.removeprefix("step-")) < first and not _is_foreign(folder):
            remove(folder)


def sweep(checkpoints_dir: Path) -> None:
    """Remove what saves left that were cut short; nothing else may be writing there."""
    with suppress(OSError):
        for path in checkpoints_dir.glob(f"step-*{PARTIAL}"):
            remove(path)


def remove(folder: Path) -> None:
    """The manifest goes first, so that one removed by half is not taken for whole."""
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
