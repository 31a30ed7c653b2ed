"""Pseudo-random permutation of a range in constant memory: a Feistel network with cycle walking.

With any round function, a Feistel network is a permutation of the integers of a given even bit width (Luby and Rackoff
1988). To restrict the permutation to 0 .. n-1, a number that is mapped outside this range is mapped again until the
result is inside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The network permutes
at most 4 n numbers, so it takes at most four passes on average to map a number into the range.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MAX_SIZE = 2**62

Numbers = NDArray[np.int64]


class Permutation:
    """A permutation of 0 .. size-1 that depends only on `size` and `key`."""

    def __init__(self, size: int, key: str):
        assert 0 < size <= MAX_SIZE
        self._size = np.uint64(size)
        half = max(1, (max(1, (size - 1).bit_length()) + 1) // 2)
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, "<u8")

    def __call__(self, numbers: Numbers) -> Numbers:
        """The numbers to which the permutation maps `numbers`, each of which must be less than `size`."""
        out = self._once(numbers.astype(np.uint64))
        while (outside := out >= self._size).any():
            out[outside] = self._once(out[outside])
        return out.astype(np.int64)

    def _once(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> self._half, x & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return (left << self._half) | right


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014). Multiplications wrap around modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
