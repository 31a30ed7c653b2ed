"""Folders of token shards for tests with several processes: each byte of the project's own documents is a token."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from engine.cli.tokenize import write_documents
from engine.data.tokenizers import Bytes
from engine.data.writing import ShardWriter

DOCS = Path(__file__).parents[2] / "docs"
SHORT = ["data.source=shards", "data.shards=SHORT"]
SHARDS = ["data.source=shards", "data.shards=SHARDS", "data.weights=[3.0, 1.0]"]


@cache
def shard_folders() -> str:
    """Write two folders of token shards; return the value of `data.shards` that selects them. The folders are removed
    when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="shards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, pattern in (("large", "[a-l]*.md"), ("small", "[m-z]*.md")):
        tokenizer = Bytes()
        with ShardWriter(folder / name, 256, 0, "bytes", shard_tokens=20_000) as writer:
            for path in sorted(DOCS.rglob(pattern)):
                write_documents(path, "text", tokenizer, writer)
    return f'["{folder}/large", "{folder}/small"]'


@cache
def short_documents() -> str:
    """Write a folder with documents of 1 to 24 tokens; return the value of `data.shards` that selects it."""
    folder = Path(tempfile.mkdtemp(prefix="shards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    text = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))[:60_000].replace(b"\0", b" ")
    lengths = np.random.Generator(np.random.Philox(key=1)).integers(1, 25, len(text))
    with ShardWriter(folder / "short", 256, 0, "bytes", shard_tokens=20_000) as writer:
        start = 0
        for length in lengths.tolist():
            writer.begin_document()
            writer.add(list(text[start : start + length - 1]))
            writer.end_document()
            start += length
            if start >= len(text):
                break
    return f'["{folder}/short"]'


def in_folders(overrides: Sequence[str]) -> list[str]:
    """Returns `overrides` with the placeholders SHARDS and SHORT replaced by lists of folders."""
    folders = {"=SHARDS": shard_folders, "=SHORT": short_documents}
    for name, made in folders.items():
        if any(one.endswith(name) for one in overrides):
            overrides = [one.replace(name, f"={made()}") if one.endswith(name) else one for one in overrides]
    return list(overrides)
