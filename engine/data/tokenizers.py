"""Tokenizers: one token per byte, or a tokenizer.json loaded with the Hugging Face library `tokenizers`. Torch-free."""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agents.protocol import clean
from agents.rundir.bounded_read import read_ordinary
from engine.config.refusal import shown
from engine.data.shards import DataError

MAX_TOKENIZER_BYTES = 2**28
# Names of the token between documents in published tokenizers, in order of preference.
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>", "[SEP]")


class Tokenizer(Protocol):
    """Converts text to token ids. `name`: recorded in index.json, to identify the tokenizer."""

    name: str
    vocab: int
    end_of_document: int

    def encode(self, texts: Sequence[bytes]) -> Sequence[Sequence[int] | NDArray[Any]]: ...

    def decode(self, ids: Sequence[int]) -> bytes: ...


@dataclass
class Bytes:
    """Each byte is a token. The zero byte is the end-of-document token."""

    name: str = "bytes"
    vocab: int = 256
    end_of_document: int = 0

    def encode(self, texts: Sequence[bytes]) -> Sequence[Sequence[int] | NDArray[Any]]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> bytes:
        """Convert token ids to bytes. An id that is not a byte is shown as a number in angle brackets."""
        return b"".join(bytes((n,)) if n < self.vocab else f"<{n}>".encode() for n in ids)


class HuggingFace:
    """A tokenizer.json. Special tokens in the text are read as plain text, so the text of a document never produces the
    end-of-document token. `end`: the end-of-document token or its id; None: the first of ENDS that is in the
    vocabulary. Raises DataError if the library is missing or the file is not a tokenizer."""

    def __init__(self, path: Path, end: str | int | None):
        if importlib.util.find_spec("tokenizers") is None:
            raise DataError(
                f"the tokenizer {path} needs the library tokenizers; pip install 'train-cockpit[data]', or use the "
                "tokenizer bytes"
            )
        from tokenizers import Tokenizer as Library

        try:
            raw = read_ordinary(path, MAX_TOKENIZER_BYTES)
            self._library = Library.from_str(raw.decode())
        except OSError as error:
            raise DataError(
                f"cannot read the tokenizer {path}: {error.strerror}; legal: a tokenizer.json, or bytes"
            ) from None
        except Exception as error:  # noqa: BLE001 - the library raises Exception itself
            why = clean(str(error))[:200]
            raise DataError(
                f"{path} is not a tokenizer.json: {why}; legal: a tokenizer.json, or bytes"
            ) from None
        self._library.no_truncation()
        self._library.no_padding()
        if hasattr(self._library, "encode_special_tokens"):
            self._library.encode_special_tokens = True
        ids = self._library.get_vocab(with_added_tokens=True)
        if not ids:
            raise DataError(f"{path} has no vocabulary; legal: a tokenizer.json with tokens")
        self.vocab = max(ids.values()) + 1
        self.name = f"{clean(path.name)[:200]} blake2b-{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
        if isinstance(end, int):
            self.end_of_document = end
            return
        wanted = (end,) if end else ENDS
        known = [name for name in wanted if name in ids]
        if not known:
            raise DataError(
                f"{path} has no token {shown(end) if end else ' or '.join(ENDS)} to end a document; legal: "
                "--end-of-document and a token of its vocabulary"
            )
        self.end_of_document = ids[known[0]]

    def encode(self, texts: Sequence[bytes]) -> Sequence[Sequence[int] | NDArray[Any]]:
        encoded = self._library.encode_batch(
            [text.decode("utf-8", "replace") for text in texts], add_special_tokens=False
        )
        return [one.ids for one in encoded]

    def decode(self, ids: Sequence[int]) -> bytes:
        """Convert token ids to text, encoded as UTF-8. The text of special tokens is included, and unknown tokens are
        left out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text.encode("utf-8", "replace")


def tokenizer_of(given: str, end: str | None) -> Tokenizer:
    """Load the tokenizer `given`, which is `bytes` or the path of a tokenizer.json. Raises DataError."""
    if given == "bytes":
        if end is not None:
            raise DataError(
                "--end-of-document requires a tokenizer.json; with bytes the zero byte ends a document"
            )
        return Bytes()
    return HuggingFace(Path(given), end)
