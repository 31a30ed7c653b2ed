"""How a buffer is divided among ranks, and how many bytes each algorithm sends. Torch-free.

A buffer of n elements has P parts; the first n mod P parts have one element more than the others. Each formula gives
the exact bytes that one rank sends, for any number of ranks and elements; if P divides n, the formulas agree with the
costs in `engine.planner.timing.costs`, which cites their sources.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from engine.planner.timing.costs import power_of_two


def edges(elements: int, parts: int) -> list[int]:
    """The index of the first element of each part, followed by `elements`."""
    each, more = divmod(elements, parts)
    return [part * each + min(part, more) for part in range(parts + 1)]


def lengths(elements: int, parts: int) -> list[int]:
    return [after - first for first, after in pairwise(edges(elements, parts))]


@dataclass(frozen=True)
class Fold:
    """How `ranks` ranks are reduced to a power of two by pairing some of them. Among the ranks below 2 * `extra`, each
    odd rank sends its buffer to the even rank before it and waits for the result. The ranks that do not wait are
    renumbered from 0 to `power` - 1, in rank order."""

    ranks: int

    @property
    def power(self) -> int:
        return power_of_two(self.ranks)

    @property
    def extra(self) -> int:
        return self.ranks - self.power

    def waits(self, rank: int) -> bool:
        return rank < 2 * self.extra and rank % 2 == 1

    def has_partner(self, rank: int) -> bool:
        return rank < 2 * self.extra and rank % 2 == 0

    def number(self, rank: int) -> int:
        """The index of `rank` among the ranks that remain after the pairing; `rank` must be one of them."""
        return rank // 2 if rank < 2 * self.extra else rank - self.extra

    def rank(self, number: int) -> int:
        return 2 * number if number < self.extra else number + self.extra

    def edges(self, elements: int) -> list[int]:
        """The index of the first element of each block, followed by `elements`. There is one block for each rank that
        remains after the pairing: the rank's own part and, if it has a partner, the partner's part."""
        whole = edges(elements, self.ranks)
        return [whole[self.rank(number)] for number in range(self.power)] + [elements]


def children(rank: int, ranks: int) -> list[int]:
    """The children of `rank` in a binomial tree with root 0, nearest first."""
    found, distance = [], 1
    while distance < ranks and not rank & distance:
        if rank + distance < ranks:
            found.append(rank + distance)
        distance *= 2
    return found


def _naive_all_reduce(rank: int, ranks: int, elements: int) -> int:
    return elements if rank else (ranks - 1) * elements


def _naive_reduce_scatter(rank: int, ranks: int, elements: int) -> int:
    return elements if rank else elements - lengths(elements, ranks)[0]


def _naive_all_gather(rank: int, ranks: int, elements: int) -> int:
    return lengths(elements, ranks)[rank] if rank else (ranks - 1) * elements


def _tree(rank: int, ranks: int, elements: int) -> int:
    return elements * (len(children(rank, ranks)) + (rank > 0))


def _ring_reduce_scatter(rank: int, ranks: int, elements: int) -> int:
    return elements - lengths(elements, ranks)[rank]


def _ring_all_gather(rank: int, ranks: int, elements: int) -> int:
    return elements - lengths(elements, ranks)[(rank + 1) % ranks]


def _ring_all_reduce(rank: int, ranks: int, elements: int) -> int:
    return _ring_reduce_scatter(rank, ranks, elements) + _ring_all_gather(rank, ranks, elements)


def _doubling_all_reduce(rank: int, ranks: int, elements: int) -> int:
    fold = Fold(ranks)
    if fold.waits(rank):
        return elements
    return elements * (fold.power.bit_length() - 1 + fold.has_partner(rank))


def _given(number: int, borders: list[int]) -> int:
    """Number of elements that the rank with index `number` sends in recursive halving. In each step the rank sends one
    half of its block and keeps the other, so in total the rank sends every element outside its final block.
    """
    return borders[-1] - (borders[number + 1] - borders[number])


def _doubled(number: int, borders: list[int]) -> int:
    """How many elements the rank with index `number` sends in recursive doubling. The rank sends its own block, then
    the aligned pair of blocks that contains its block, then the aligned group of four, and so on."""
    sent, width = 0, 1
    while width < len(borders) - 1:
        first = number // width * width
        sent += borders[first + width] - borders[first]
        width *= 2
    return sent


def _halving(rank: int, ranks: int, elements: int) -> int:
    fold = Fold(ranks)
    if fold.waits(rank):
        return elements
    result = lengths(elements, ranks)[rank + 1] if fold.has_partner(rank) else 0
    return _given(fold.number(rank), fold.edges(elements)) + result


def _doubling_all_gather(rank: int, ranks: int, elements: int) -> int:
    fold = Fold(ranks)
    if fold.waits(rank):
        return lengths(elements, ranks)[rank]
    return _doubled(fold.number(rank), fold.edges(elements)) + elements * fold.has_partner(rank)


def _halving_doubling(rank: int, ranks: int, elements: int) -> int:
    fold = Fold(ranks)
    if fold.waits(rank):
        return elements
    number, borders = fold.number(rank), edges(elements, fold.power)
    return _given(number, borders) + _doubled(number, borders) + elements * fold.has_partner(rank)


SENT: dict[str, dict[str, Callable[[int, int, int], int]]] = {
    "all_reduce": {
        "naive": _naive_all_reduce,
        "tree": _tree,
        "ring": _ring_all_reduce,
        "doubling": _doubling_all_reduce,
        "halving-doubling": _halving_doubling,
    },
    "reduce_scatter": {
        "naive": _naive_reduce_scatter,
        "ring": _ring_reduce_scatter,
        "halving": _halving,
    },
    "all_gather": {
        "naive": _naive_all_gather,
        "ring": _ring_all_gather,
        "doubling": _doubling_all_gather,
    },
}
"""(kind, algorithm) -> elements that a rank sends, as a function of (rank, ranks, elements); without hierarchical."""


def sent_elements(
    kind: str, algorithm: str, rank: int, ranks: int, elements: int, node: int | None = None
) -> int:
    """Number of elements that `rank` sends to other ranks. `node`: ranks per node, for the hierarchical algorithm."""
    if algorithm != "hierarchical":
        return SENT[kind][algorithm](rank, ranks, elements)
    assert node
    index, own = rank % node, rank // node
    nodes = ranks // node
    if kind == "all_reduce":
        inside = lengths(elements, node)
        scatter, gather = elements - inside[index], elements - inside[(index + 1) % node]
        return scatter + _ring_all_reduce(own, nodes, inside[index]) + gather
    parts = lengths(elements, ranks)
    # Number of elements that one rank of each node reduces.
    held = [sum(parts[one::node]) for one in range(node)]
    if kind == "reduce_scatter":
        return elements - held[index] + held[index] - parts[rank]
    return held[index] - parts[(own + 1) % nodes * node + index] + elements - held[(index + 1) % node]
