"""The manifest of a checkpoint, and the names of a checkpoint's folder and files. Torch-free."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from agents.protocol import Changes
from engine.checkpoint.tensor_index import FileName, Natural
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.config.sections.bounds import Digest

FORMAT = 2  # the engine does not read format 1, because its index was a pickle
MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.crc32"  # contains the CRC-32 of the manifest's bytes, in hexadecimal
PARTIAL = ".partial"  # suffix of a folder that is being written
OLD = ".old"  # suffix of a checkpoint that is being replaced by another one of the same step


class IncompleteError(RefusedError):
    """The folder contains no complete checkpoint. The message gives the reason in one sentence."""


class OtherFormatError(IncompleteError):
    """The checkpoint was written by another engine version, in a format that this version cannot read."""


class Applied(Struct, frozen=True):
    """One applied change of knob values. The new values take effect at step `step`."""

    revision: Natural
    step: Natural
    changes: Changes


class Manifest(Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint: the run, its layout and knobs, and the files with sizes and checksums."""

    format: int = FORMAT
    # Larger than the serials of all checkpoints that the folder had when this one was saved.
    serial: Natural = 0
    step: Natural  # number of steps done, and the first step that a resumed run trains
    run: str
    layout: Layout  # the layout as the user wrote it, without changes made by operators
    data: Digest | None  # digest of the training text; None: weights only
    weights_only: bool = False  # whether the optimizer state is missing, as after `engine import-hf`
    knobs: Changes
    revision: Natural
    history: list[Applied]
    torch: str
    loss_scale: Annotated[float, Meta(gt=0)] | None = None  # with fp16: the scale of the next step
    good_steps: Natural = 0  # with fp16: steps without overflow since the scale last changed
    skipped_steps: Natural = 0
    huggingface: dict[str, Any] | None = None  # config.json of the model that `engine import-hf` imported
    files: dict[FileName, Natural] = {}  # name -> bytes
    sums: dict[FileName, Natural] = {}  # name -> CRC-32 of its content


class Format(Struct):
    """The format number, which is the only field that manifests of all formats have."""

    format: int


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


def checkpoints_folder(layout: Layout, run_dir: Path) -> Path:
    """The folder for the checkpoints of the run in `run_dir`."""
    return Path(layout.checkpoint.dir) / run_dir.name if layout.checkpoint.dir else run_dir / "checkpoints"


def folder_name(step: int) -> str:
    return f"step-{step}"


def manifest_sum(raw: bytes) -> bytes:
    """The content of the file `MANIFEST_SUM`: the CRC-32 of the manifest, whose bytes are `raw`."""
    return b"%08x\n" % zlib.crc32(raw)
