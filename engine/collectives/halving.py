"""Recursive halving and doubling (Thakur, Rabenseifner and Gropp 2005, sections 4.1-4.5), for any number of ranks.

P is the number of ranks, and p is the largest power of two that is at most P. If p < P, 2 (P - p) ranks first fold in
pairs (`engine.collectives.parts`): in each pair, the odd rank sends its buffer to the even rank, which adds it. At the
end the even rank sends back the result.

Halving (reduce-scatter) has log2 p steps. In each step a rank exchanges data with the rank at distance p/2, p/4, ...,
1: it sends one half of its block, receives its peer's values of the half that it keeps, and adds them. Doubling
(all-gather) runs the same steps in reverse order, without additions.

This module implements two all-reduce algorithms. Halving-doubling runs halving and then doubling: 2 log2 p steps and 2
(p-1)/p n bytes. Recursive doubling exchanges and adds the whole buffer at distance 1, 2, 4, ...: log2 p steps and n
log2 p bytes. Both ranks of a pair add the same two numbers, so the result is bitwise equal on all ranks.
"""

import torch
from torch import Tensor

from engine.collectives.parts import Fold, edges
from engine.collectives.port import Port
from engine.collectives.ring import split


def _fold_in(port: Port, fold: Fold, x: Tensor) -> None:
    if fold.waits(port.rank):
        port.exchange([(port.rank - 1, x)])
    elif fold.has_partner(port.rank):
        port.add_from(port.rank + 1, x, torch.empty_like(x))


def _fold_out(port: Port, fold: Fold, result: Tensor) -> None:
    """The even rank sends `result` to its partner, which receives the data into its own `result`."""
    if fold.waits(port.rank):
        port.exchange([], [(port.rank - 1, result)])
    elif fold.has_partner(port.rank):
        port.exchange([(port.rank + 1, result)])


def _halve(port: Port, fold: Fold, x: Tensor, borders: list[int]) -> None:
    number, received = fold.number(port.rank), torch.empty_like(x)
    width = fold.power // 2
    while width:
        peer = number ^ width
        keeps, gives = (_block(x, borders, one, width) for one in (number, peer))
        port.add_from(fold.rank(peer), keeps, received[: len(keeps)], gives)
        width //= 2


def _double(port: Port, fold: Fold, x: Tensor, borders: list[int]) -> None:
    number, width = fold.number(port.rank), 1
    while width < fold.power:
        peer = number ^ width
        mine, other = (_block(x, borders, one, width) for one in (number, peer))
        port.exchange([(fold.rank(peer), mine)], [(fold.rank(peer), other)])
        width *= 2


def _block(x: Tensor, borders: list[int], number: int, width: int) -> Tensor:
    """The part of `x` that contains the block with index `number`: `width` consecutive blocks, aligned to a multiple of
    `width`."""
    first = number // width * width
    return x[borders[first] : borders[first + width]]


def halving_doubling_all_reduce(port: Port, x: Tensor) -> None:
    fold = Fold(port.size)
    _fold_in(port, fold, x)
    if not fold.waits(port.rank):
        borders = edges(x.numel(), fold.power)
        _halve(port, fold, x, borders)
        _double(port, fold, x, borders)
    _fold_out(port, fold, x)


def doubling_all_reduce(port: Port, x: Tensor) -> None:
    fold = Fold(port.size)
    _fold_in(port, fold, x)
    if not fold.waits(port.rank):
        number, received, distance = fold.number(port.rank), torch.empty_like(x), 1
        while distance < fold.power:
            port.add_from(fold.rank(number ^ distance), x, received, x)
            distance *= 2
    _fold_out(port, fold, x)


def halving_reduce_scatter(port: Port, x: Tensor) -> None:
    """After the fold, a rank with a partner reduces its own part and its partner's part."""
    fold, parts = Fold(port.size), split(x, port.size)
    _fold_in(port, fold, x)
    if not fold.waits(port.rank):
        _halve(port, fold, x, fold.edges(x.numel()))
    _fold_out(port, fold, parts[port.rank + fold.has_partner(port.rank)])


def doubling_all_gather(port: Port, x: Tensor) -> None:
    fold, parts = Fold(port.size), split(x, port.size)
    if fold.waits(port.rank):
        port.exchange([(port.rank - 1, parts[port.rank])])
    elif fold.has_partner(port.rank):
        port.exchange([], [(port.rank + 1, parts[port.rank + 1])])
    if not fold.waits(port.rank):
        _double(port, fold, x, fold.edges(x.numel()))
    _fold_out(port, fold, x)
