"""`engine tokenize`: turns text into token shards for training."""

import argparse
import importlib.util
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options

if TYPE_CHECKING:  # numpy is imported only when the command runs
    from engine.data.shards import Source
    from engine.data.tokenizers import Tokenizer
    from engine.data.writing import ShardWriter

ABOUT = "turn text files and JSON lines into token shards for [data]"
BATCH_BYTES = 2**22  # bytes of text per call of the tokenizer
SHARD_TOKENS = 2**28


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("tokenize", help=ABOUT, description=ABOUT)
    parser.add_argument(
        "inputs",
        nargs="*",
        type=Path,
        metavar="INPUT",
        help="a .jsonl file has one document per line; any other file is one document",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE|bytes",
        help="a tokenizer.json of Hugging Face, or bytes: each byte is a token",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="the new folder of token shards")
    parser.add_argument(
        "--field", default="text", help="field of a JSON line that contains the text (default: text)"
    )
    parser.add_argument(
        "--end-of-document",
        metavar="TOKEN",
        help="token after each document (default: the tokenizer's own)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=int,
        default=SHARD_TOKENS,
        metavar="N",
        help=f"tokens per shard (default: {SHARD_TOKENS:,})",
    )
    parser.add_argument(
        "--check", type=Path, metavar="FOLDER", help="verify a folder of token shards instead"
    )


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("tokenize", rest)
    if importlib.util.find_spec("numpy") is None:
        refuse("engine tokenize needs numpy; pip install 'train-cockpit[data]'")
    from engine.data.shards import Source
    from engine.data.tokenizers import tokenizer_of
    from engine.data.writing import ShardWriter

    if options.check:
        if damage := (source := Source(options.check)).damage():
            refuse(damage)
        print_text(f"{_described(options.check, source)}, all checksums match\n")
        return
    for name, given in (
        ("INPUT", options.inputs),
        ("--tokenizer", options.tokenizer),
        ("--out", options.out),
    ):
        if not given:
            refuse(f"engine tokenize needs {name} (see engine tokenize --help)")
    if not 1 <= options.shard_tokens <= 2**40:
        refuse(f"--shard-tokens = {options.shard_tokens} is not legal; legal: from 1 to {2**40}")
    # SIGTERM raises KeyboardInterrupt, so that the writer removes the unfinished folder.
    signal.signal(signal.SIGTERM, _interrupt)
    tokenizer = tokenizer_of(options.tokenizer, options.end_of_document)
    began = time.monotonic()
    try:
        with ShardWriter(
            options.out,
            tokenizer.vocab,
            tokenizer.end_of_document,
            tokenizer.name,
            options.shard_tokens,
        ) as writer:
            for path in options.inputs:
                write_documents(path, options.field, tokenizer, writer)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; nothing was written\n")
        raise SystemExit(130) from None
    print_text(f"{_described(options.out, Source(options.out))}, in {time.monotonic() - began:.1f} s\n")


def write_documents(path: Path, field: str, tokenizer: "Tokenizer", writer: "ShardWriter") -> None:
    """Tokenize the documents of a file, in batches of about BATCH_BYTES."""
    from engine.data.documents import documents

    # Part of a document, whether it is the first of its document, whether it is the last.
    batch: list[tuple[bytes, bool, bool]] = []
    size = 0
    for part in chain.from_iterable(_marked(document) for document in documents(path, field)):
        batch.append(part)
        size += len(part[0])
        if size >= BATCH_BYTES:
            _write(batch, tokenizer, writer)
            batch, size = [], 0
    _write(batch, tokenizer, writer)


def _marked(document: Iterator[bytes]) -> Iterator[tuple[bytes, bool, bool]]:
    """The chunks of text (parts) of a document, each with two flags: whether it is the document's first, and whether it
    is the last. Yields nothing for an empty document."""
    part, first = next(document, None), True
    while part is not None:
        following = next(document, None)
        if part:
            yield part, first, following is None
        part, first = following, False


def _write(batch: list[tuple[bytes, bool, bool]], tokenizer: "Tokenizer", writer: "ShardWriter") -> None:
    for ids, (_, first, last) in zip(tokenizer.encode([part for part, _, _ in batch]), batch, strict=True):
        if first:
            writer.begin_document()
        writer.add(ids)
        if last:
            writer.end_document()


def _described(folder: Path, source: "Source") -> str:
    index = source.index
    count = len(index.shards)
    shards = "1 shard" if count == 1 else f"{count:,} shards"
    return (
        f"{folder}: {index.tokens:,} tokens of {index.documents:,} documents in {shards}, "
        f"{index.dtype}, vocabulary {index.vocab:,}, tokenizer {index.tokenizer}"
    )


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
