"""Packs many messages that differ only in some numeric fields. One message is packed with placeholder values (marks),
which are then replaced by the values of each message."""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agents.protocol import FRAME_BYTES, Message, codec

# The first marks. No real message contains such numbers.
_COUNT, _REAL = 0xFFFF_FFF1_0000_0000, 1e-290

Columns = Mapping[str, Any]
"""Name of the mark -> an array of numbers, [row], or one number for all rows."""


class Marks:
    """Placeholder values for the columns of a `Template`, by name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.reals: dict[str, float] = {}

    def count(self, name: str) -> int:
        """The placeholder value for the column `name`, which contains non-negative integers."""
        return self.counts.setdefault(name, _COUNT + len(self.counts))

    def real(self, name: str) -> float:
        return self.reals.setdefault(name, _REAL * (1 + len(self.reals)))


class Template:
    """The packed form of the message that `make` returns; `pack` replaces the message's placeholder values."""

    def __init__(self, make: Callable[[Marks], Message]):
        marks = Marks()
        packed = codec.pack(make(marks))
        self._row = np.frombuffer(packed, dtype=np.uint8)
        marked = {name: (struct.pack(">Q", count), ">u8") for name, count in marks.counts.items()}
        marked |= {name: (struct.pack(">d", real), ">f8") for name, real in marks.reals.items()}
        assert all(packed.count(mark) == 1 for mark, _ in marked.values()), "a mark must occur exactly once"
        self._places = {name: (packed.index(mark), kind) for name, (mark, kind) in marked.items()}

    def pack(self, columns: Columns) -> NDArray[np.uint8]:
        """Returns the packed messages as an array [row, byte], one message per row."""
        rows = max(np.size(columns[name]) for name in self._places)
        packed = np.tile(self._row, (rows, 1))
        for name, (at, kind) in self._places.items():
            values = np.broadcast_to(np.asarray(columns[name]), rows).astype(kind)
            packed[:, at : at + 8] = values.view(np.uint8).reshape(rows, 8)
        return packed


def frames(packed: NDArray[np.uint8]) -> Iterator[bytes]:
    """Divide the packed messages into frames of at most `FRAME_BYTES`."""
    room = max(1, (FRAME_BYTES - 16) // packed.shape[1])
    for first in range(0, len(packed), room):
        rows = packed[first : first + room]
        yield codec.frame_of_joined(len(rows), rows.tobytes())
