"""Converts generated tokens to text for a terminal, piece by piece. Torch-free."""

import codecs

from engine.data.tokenizers import Tokenizer

KEPT = "\n\t"  # control characters that ordinary text needs


def escaped(text: str) -> str:
    """`text` with each control character and bidi mark, except newlines and tabs, replaced by an escape such as \\x1b.
    Text from a model may contain characters that would change the state of the terminal."""
    return "".join(c if c.isprintable() or c in KEPT else c.encode("unicode_escape").decode() for c in text)


class TextStream:
    """Decodes tokens to text as they arrive. Bytes that are not UTF-8 become escapes such as \\xff."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._ids: list[int] = []
        self._given = 0  # bytes that the decoder has received

    def add(self, token: int) -> str:
        """Add one token, and return the text that is now complete; it may be empty."""
        self._ids.append(token)
        whole = self._tokenizer.decode(self._ids)
        # A token may end inside a character: until the rest arrives, the tokenizer decodes a replacement
        # character.
        if whole.endswith("\ufffd".encode()):
            return ""
        part, self._given = whole[self._given :], len(whole)
        return escaped(self._decoder.decode(part))

    def end(self) -> str:
        """The remaining text."""
        part = self._tokenizer.decode(self._ids)[self._given :]
        return escaped(self._decoder.decode(part, True))
