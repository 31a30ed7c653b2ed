"""Reads documents from text files and JSON lines, in bounded memory. Torch-free."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.data.shards import DataError

PART = 2**20  # bytes of a text file that are tokenized at once
MAX_LINE = 2**26  # bytes of a JSON line

Document = Iterator[bytes]
"""A document in parts; only a long text file has more than one part."""


def documents(path: Path, field: str) -> Iterator[Document]:
    """Yield the documents of a file. In a .jsonl or .ndjson file each line is a document, with its text in `field`; any
    other file is one document. The caller must read a document to its end before it requests the next one. Raises
    DataError."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file; legal: text files and .jsonl files")
        with path.open("rb") as file:
            if path.suffix in (".jsonl", ".ndjson"):
                for number, line in _lines(file, path):
                    yield iter([_text(line, field, path, number)])
            else:
                yield _parts(file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise DataError(f"{path} line {number} is too long; legal: at most {MAX_LINE >> 20} MiB")
        if line.strip():
            yield number, line


def _text(line: bytes, field: str, path: Path, number: int) -> bytes:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise DataError(f"{path} line {number} is not JSON; legal: an object on each line") from None
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise DataError(
            f"{path} line {number} has no text in the field {field!r}; legal: an object with that field, or --field"
        )
    return text.encode("utf-8", "surrogatepass")


def _parts(file: BinaryIO) -> Document:
    """Yield a text file in parts of about PART bytes. A part ends at a newline, because few tokens span a newline. Text
    without newlines is cut between two UTF-8 characters, into parts of about 4 x PART bytes.
    """
    rest = b""
    while chunk := file.read(PART):
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if not end and len(rest) >= 4 * PART:
            end = len(rest) - 4
            while end > 0 and rest[end] & 0xC0 == 0x80:
                end -= 1
        if end:
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
