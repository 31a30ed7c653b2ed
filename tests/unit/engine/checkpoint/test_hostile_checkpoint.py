"""Malicious files in a checkpoint's folder: no code in them runs, and each is refused with a one-sentence error
message."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from engine.checkpoint.manifest import MANIFEST, MANIFEST_SUM
from engine.checkpoint.reading import damage
from engine.checkpoint.resume_point import find_start
from engine.checkpoint.tensor_index import INDEX
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO

LAYOUT = load(DEMO, [*SMALL, "train.steps=2"])


class Shell:
    """An object whose unpickling runs a shell command."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


def sign(folder: Path) -> None:
    """Update sizes and checksums in the manifest, so that they match the changed files."""
    manifest = json.loads((folder / MANIFEST).read_text())
    content = {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in (MANIFEST, MANIFEST_SUM)}
    manifest["files"] = {name: len(raw) for name, raw in content.items()}
    manifest["sums"] = {name: zlib.crc32(raw) for name, raw in content.items()}
    raw = json.dumps(manifest).encode()
    (folder / MANIFEST).write_bytes(raw)
    (folder / MANIFEST_SUM).write_text(f"{zlib.crc32(raw):08x}\n")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", store=single_rank_context(folder).store(), rank=0, world_size=1)
    try:
        checkpoints_dir = Trainer(LAYOUT, checkpoints_dir=folder).saving.checkpoints
        assert checkpoints_dir
        checkpoints_dir.save(1)
        checkpoints_dir.wait()
    finally:
        dist.destroy_process_group()
    return folder / "step-1"


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to tamper with."""
    return Path(shutil.copytree(saved, tmp_path / "step-1"))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["rank-0.bin", INDEX, ".metadata", "extra.pkl"])
def test_no_file_is_unpickled(folder: Path, tmp_path: Path, group: None, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(Shell(tmp_path / "ran")))
    sign(folder)
    refusal = ""
    try:
        Trainer(LAYOUT, resume=folder)
    except ValueError as refused:
        refusal = str(refused)
    assert "\n" not in refusal and not (tmp_path / "ran").exists()
    assert bool(refusal) == (name != "extra.pkl"), "a file that the index does not name is not read"


def change(folder: Path, key: str, value: Any) -> None:
    """Set the field `key` in the index entry of the embedding weight. If it is a field of the entry's chunks, set it in
    the first chunk."""
    index = json.loads((folder / INDEX).read_text())
    stored = index["model.embedding.weight"]
    where = stored["chunks"][0] if key in stored["chunks"][0] else stored
    where[key] = value
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("shape", [2**53, 2**53], "has chunks that do not add up to its shape"),
        ("shape", [-1, 32], "cannot be read: Expected `int` >= 0"),
        ("shape", [1] * 99, "cannot be read: Expected `array` of length <= 8"),
        ("shape", "all", "cannot be read: Expected `array`"),
        ("sizes", [2**53, 2**53], "reaches beyond its shape"),
        ("sizes", [256], "a different number of dimensions"),
        ("sizes", [1, 1], "has chunks that do not add up to its shape"),
        ("offsets", [1, 0], "reaches beyond its shape"),
        ("at", 2**53, "reaches beyond the end of rank-0.bin"),
        ("at", -8, "cannot be read: Expected `int` >= 0"),
        ("at", 10**400, "cannot be read: "),
        ("file", "../../../etc/passwd", "cannot be read: Expected `str` matching regex"),
        ("file", "a\0b", "cannot be read: Expected `str` matching regex"),
        ("file", "another.bin", "reaches beyond the end of another.bin"),
        ("dtype", "object", "has an unknown dtype; legal: float64, float32"),
        ("dtype", "float64", "reaches beyond the end of rank-0.bin"),
        ("chunks", [], "has chunks that do not add up to its shape"),
        ("code", "os.system", "cannot be read: Object contains unknown field `code`"),
    ],
)
def test_an_index_is_checked_before_it_is_used(folder: Path, key: str, value: Any, why: str) -> None:
    # All tensors are in one file and the embedding is not the last of them, so a chunk of twice its size would still be
    # inside the file.
    if key == "dtype" and value == "float64":
        change(folder, "at", (folder / "rank-0.bin").stat().st_size - 256 * 32 * 4)
    change(folder, key, value)
    message = damage(folder) or ""
    assert why in message and "\n" not in message and len(message) < 400
    with pytest.raises(LayoutError) as refused:
        find_start(LAYOUT, folder, None, folder / "new", False)
    assert str(refused.value) == f"there is nothing to resume: {message}"


def nested(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def endless(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")


def elsewhere(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


@pytest.mark.parametrize("name", [MANIFEST, MANIFEST_SUM, INDEX, "rank-0.bin"])
@pytest.mark.parametrize("spoil", [nested, pipe, endless, elsewhere])
def test_a_file_of_another_kind_gets_one_sentence(
    folder: Path, name: str, spoil: Callable[[Path, str], None]
) -> None:
    spoil(folder, name)
    if spoil is nested and name in (INDEX, "rank-0.bin"):
        sign(folder)
    if spoil is nested and name == "rank-0.bin":
        return  # this file has tensor data and no JSON, so any content is valid
    with pytest.raises(LayoutError) as refused:
        find_start(LAYOUT, folder, None, folder / "new", False)
    assert "\n" not in str(refused.value) and str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("files", {"a\0b": 3}),
        ("files", {"../x": 3}),
        ("files", {"x" * 300: 3}),
        ("knobs", {"no_such": 3}),
        ("knobs", {"micro_batches": "many"}),
        ("knobs", {"micro_batches": 10**400}),
        ("knobs", {"x" * 10**6: 3}),
        ("knobs", {"recompute": ["full"]}),
        ("step", -5),
        ("step", 2**80),
        ("layout", []),
        ("history", [{"revision": -1, "step": 1, "changes": {}}]),
        ("sums", {}),
    ],
)
def test_a_wrong_manifest_does_not_block_an_older_checkpoint(
    folder: Path, saved: Path, key: str, value: Any
) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest |= {"serial": 9, key: value}
    raw = json.dumps(manifest).encode()
    bad = folder.parent / "run/checkpoints/step-9"
    shutil.copytree(folder, bad)
    (bad / MANIFEST).write_bytes(raw)
    (bad / MANIFEST_SUM).write_text(f"{zlib.crc32(raw):08x}\n")
    shutil.copytree(saved, bad.parent / "step-1")
    messages: list[str] = []
    start = find_start(LAYOUT, True, folder.parent / "run", folder / "new", False, warn=messages.append)
    assert start.checkpoint and start.checkpoint.manifest.step == 1
    assert (
        len(messages) == 1
        and messages[0].startswith(f"skipped a checkpoint: {bad} ")
        and len(messages[0]) < 600
    ), messages


def test_a_checkpoint_of_other_tensors_is_refused(folder: Path, tmp_path: Path, group: None) -> None:
    index = json.loads((folder / INDEX).read_text())
    norm = index.pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps(index))
    sign(folder)
    with pytest.raises(
        ValueError, match=r"cannot resume from .*step-1: rank 0: it has no tensor model\.norm"
    ):
        Trainer(LAYOUT, resume=folder)
    norm["shape"] = norm["chunks"][0]["sizes"] = [16]
    (folder / INDEX).write_text(json.dumps(index | {"model.norm.weight": norm}))
    sign(folder)
    with pytest.raises(
        ValueError, match=r"its model\.norm\.weight has the shape \[16\], the layout's has \[32\]"
    ):
        Trainer(LAYOUT, resume=folder)
