"""The newest record of each rank, stored as msgpack bytes and decoded on each read.

A decoded record with a long list takes about ten times the memory of its msgpack encoding: the all-to-all rows of 4,096
ranks, with 64 destinations in each row, take 25 MiB in total as Python objects. A client rarely reads a record with
such a long list, so it is kept as msgpack bytes.
"""

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TypeVar

import msgspec

from agents.protocol import Peers, Timeline

R = TypeVar("R", Peers, Timeline)


class EncodedRecords(MutableMapping[int, R]):
    """The newest record of each rank. Each read of a record returns a new object."""

    def __init__(self, kind: type[R], encoded: Iterable[tuple[int, bytes]] = ()) -> None:
        self._kind: type[R] = kind
        self._encoded = dict(encoded)

    def __getitem__(self, rank: int) -> R:
        record: R = msgspec.msgpack.decode(self._encoded[rank], type=self._kind)
        return record

    def __setitem__(self, rank: int, record: R) -> None:
        self._encoded[rank] = msgspec.msgpack.encode(record)

    def __delitem__(self, rank: int) -> None:
        del self._encoded[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._encoded)

    def __len__(self) -> int:
        return len(self._encoded)

    def __contains__(self, rank: object) -> bool:
        return rank in self._encoded

    def __copy__(self) -> "EncodedRecords[R]":
        return self.copy()

    def copy(self) -> "EncodedRecords[R]":
        """A copy that does not change when records are added later."""
        return EncodedRecords(self._kind, self._encoded.items())

    def clear(self) -> None:
        self._encoded.clear()
