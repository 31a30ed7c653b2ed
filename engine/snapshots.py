"""Snapshots on disk: which are whole, which is the newest, which are too many. Torch-free, so that refusing is quick.

A run's snapshots lie in one folder, its shelf; docs/snapshots.md says what is in each. A snapshot is written under a
name of its own (`step-5.partial`) and gets its manifest last and then its name, so what has a manifest was whole once;
the sizes in the manifest tell whether it still is.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from agents.runs import RunError
from agents.wire import Changes
from engine.layout import Layout

FORMAT = 1
MANIFEST = "manifest.json"
PARTIAL = ".partial"
LOCK = ".lock"  # on a shelf: held by the run that saves there; in it, who that is
HOLD_S = (
    3.0  # how long a run is waited for that still holds a shelf: one that was killed takes a moment to go
)
_NAME = re.compile(r"step-\d+")


class TornError(ValueError):
    """Why a folder is not a whole snapshot: one sentence."""


class Applied(Struct, frozen=True):
    """One revision of the knobs, in force from `step` on."""

    revision: int
    step: int
    changes: Changes


class Manifest(Struct, frozen=True, kw_only=True):
    """What a snapshot says of itself."""

    format: int = FORMAT
    serial: int = 0  # larger than that of every snapshot that lay on the shelf when it was saved
    step: int  # steps done; also the first step that a run continued from here trains
    run: str
    layout: Layout  # as it was given: without what operators have turned
    knobs: Changes
    revision: int
    history: list[Applied]
    torch: str
    files: dict[str, int] = {}  # name -> bytes


class _Format(Struct):
    format: int


@dataclass(frozen=True)
class Snapshot:
    """A whole one."""

    folder: Path
    manifest: Manifest


def shelf_of(layout: Layout, run_dir: Path) -> Path:
    """Where the run with that folder keeps its snapshots."""
    return Path(layout.snapshot.dir) / run_dir.name if layout.snapshot.dir else run_dir / "snapshots"


def name_of(step: int) -> str:
    return f"step-{step}"


def is_named_so(folder: Path) -> bool:
    """Whether it has the name that snapshots have."""
    return _NAME.fullmatch(folder.name) is not None


@contextmanager
def hold(
    shelf: Path, patience_s: float = HOLD_S, told: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Keep other runs off a shelf, which is made if need be; RunError, one sentence, where that cannot be.

    The kernel lets go of it when the last process of the run has died, however it did: processes that are forked
    meanwhile hold it too. `told` hears, in a sentence, that this file system has no locks.
    """
    try:
        shelf.mkdir(parents=True, exist_ok=True)
        lock = (shelf / LOCK).open("a+")
    except OSError as error:
        raise RunError(f"no snapshots can be saved in {shelf}: {error.strerror}") from None
    with lock:
        end = time.monotonic() + patience_s
        while not _locked(lock.fileno(), told):
            if time.monotonic() >= end:
                lock.seek(0)
                who = lock.read().strip() or "another process"
                raise RunError(
                    f"{shelf} is in use by {who}, a run that is still alive; end it first, "
                    "or choose another folder with --run-dir"
                )
            time.sleep(0.05)
        with suppress(OSError):  # a full disk keeps the lock
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            lock.flush()
        yield


def _locked(descriptor: int, told: Callable[[str], None]) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        told(
            f"the file system of the snapshots has no locks ({error.strerror}), so keep other runs off their folder"
        )
    return True


def read(folder: Path) -> Snapshot:
    """The snapshot in `folder`; TornError if it is not whole or not of this format."""
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise TornError(f"{folder} is not a whole snapshot: {MANIFEST}: {error.strerror}") from None
    try:
        written_in = msgspec.json.decode(raw, type=_Format).format
        if written_in != FORMAT:
            raise TornError(f"{folder} is written in format {written_in}, and this engine reads {FORMAT}")
        manifest = msgspec.json.decode(raw, type=Manifest)
    except msgspec.MsgspecError as error:
        raise TornError(f"{folder} is not a whole snapshot: {MANIFEST} cannot be read: {error}") from None
    for name, size in manifest.files.items():
        found = _size(folder / name)
        if found != size:
            raise TornError(f"{folder} is not a whole snapshot: {name} has {found} of {size} bytes")
    return Snapshot(folder, manifest)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def whole(shelf: Path, torn: Callable[[str], None] = lambda _: None) -> list[Snapshot]:
    """The whole snapshots on a shelf, oldest first; `torn` is told of each that is not, in a sentence.

    The newest is the one saved last, not the one with most steps: a run continued from an older snapshot has left the
    younger ones' future.
    """
    found = []
    for folder in _folders(shelf):
        try:
            found.append(read(folder))
        except TornError as why:
            torn(str(why))
    return sorted(found, key=lambda snapshot: snapshot.manifest.serial)


def _folders(shelf: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from (path for path in sorted(shelf.iterdir()) if _NAME.fullmatch(path.name) and path.is_dir())


def seal(partial: Path, manifest: Manifest) -> Snapshot:
    """Make what was written into `partial` a snapshot: all of it, or, if the machine dies meanwhile, none of it."""
    shelf = partial.parent
    folder = shelf / name_of(manifest.step)
    serials = [snapshot.manifest.serial for snapshot in whole(shelf)]
    sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
    manifest = msgspec.structs.replace(manifest, serial=max(serials, default=0) + 1, files=sizes)
    with (partial / MANIFEST).open("xb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    _sync(partial)
    aside = folder.with_name(f"{folder.name}.old{PARTIAL}")
    if folder.exists():  # of a future that was left
        folder.rename(aside)
    partial.rename(folder)
    _sync(shelf)
    shutil.rmtree(aside, ignore_errors=True)
    return Snapshot(folder, manifest)


def _sync(folder: Path) -> None:
    """Names reach the disk with their folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(shelf: Path, keep: int) -> None:
    """Remove all but the `keep` newest whole snapshots, and torn ones with fewer steps than those."""
    snapshots = whole(shelf)
    kept = snapshots[-keep:]
    for snapshot in snapshots[:-keep]:
        remove(snapshot.folder)
    first = min((snapshot.manifest.step for snapshot in kept), default=0)
    for folder in set(_folders(shelf)) - {snapshot.folder for snapshot in kept}:
        if int(folder.name.removeprefix("step-")) < first:
            remove(folder)


def sweep(shelf: Path) -> None:
    """Remove what saves left that were cut short; nothing else may be writing there."""
    with suppress(OSError):
        for path in shelf.glob(f"step-*{PARTIAL}"):
            remove(path)


def remove(folder: Path) -> None:
    """The manifest goes first, so that one removed by half is not taken for whole."""
    with suppress(OSError):
        (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
