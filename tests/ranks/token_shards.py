"""Token shards of two sources for tests with several processes: the project's own documents, as bytes."""

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from engine.cli.tokenize import write_documents
from engine.data.tokenizers import Bytes
from engine.data.writing import ShardWriter

DOCS = Path(__file__).parents[2] / "docs"
SHARDS = ["data.source=shards", "data.shards=SHARDS", "data.weights=[3.0, 1.0]"]


@cache
def shard_folders() -> str:
    """The two folders as the value of `data.shards`. They are removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="shards-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, pattern in (("large", "[a-l]*.md"), ("small", "[m-z]*.md")):
        tokenizer = Bytes()
        with ShardWriter(folder / name, 256, 0, "bytes", shard_tokens=20_000) as writer:
            for path in sorted(DOCS.rglob(pattern)):
                write_documents(path, "text", tokenizer, writer)
    return f'["{folder}/large", "{folder}/small"]'


def in_folders(overrides: Sequence[str]) -> list[str]:
    """The overrides with the folders in place of SHARDS."""
    return [one.replace("=SHARDS", f"={shard_folders()}") if "=SHARDS" in one else one for one in overrides]
