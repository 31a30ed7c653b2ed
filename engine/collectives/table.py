"""The table of the algorithms for collectives that use only point-to-point messages.

An algorithm works in place on a contiguous buffer [n], which has the same size on all ranks. An all-reduce leaves the
sum on every rank. A reduce-scatter leaves the sum of part r on rank r (`engine.collectives.parts`) and the other parts
undefined. An all-gather copies part r from rank r to every rank. The algorithms work for any number of elements and any
number of ranks.

Sums are computed in the buffer's dtype, in an order that depends only on the algorithm, the number of ranks and the
size. So a collective gives bitwise the same result in every run. After an all-reduce or an all-gather, the buffers are
also bitwise equal on all ranks. In bf16 each addition is rounded to bf16: a sum is rounded P - 1 times in a ring, and
ceil(log2 P) times in a tree or in recursive halving.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from engine.collectives import halving, ring, tree
from engine.collectives.parts import sent_elements
from engine.collectives.port import Port

Algorithm = Callable[[Port, Tensor], None]

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": {
        "naive": tree.naive_all_reduce,
        "tree": tree.tree_all_reduce,
        "ring": ring.all_reduce,
        "doubling": halving.doubling_all_reduce,
        "halving-doubling": halving.halving_doubling_all_reduce,
    },
    "reduce_scatter": {
        "naive": tree.naive_reduce_scatter,
        "ring": ring.reduce_scatter,
        "halving": halving.halving_reduce_scatter,
    },
    "all_gather": {
        "naive": tree.naive_all_gather,
        "ring": ring.all_gather,
        "doubling": halving.doubling_all_gather,
    },
}
HIERARCHICAL: dict[str, Callable[[Port, Tensor, int], None]] = {
    "all_reduce": ring.hierarchical_all_reduce,
    "reduce_scatter": ring.hierarchical_reduce_scatter,
    "all_gather": ring.hierarchical_all_gather,
}


def names(kind: str, node: int | None = None) -> list[str]:
    """The names of the algorithms for a collective. `hierarchical` is included only if `node`, the number of ranks per
    node, is given."""
    return [*ALGORITHMS[kind], *(["hierarchical"] if node else [])]


def algorithm(kind: str, name: str, node: int | None = None) -> Algorithm:
    """The function that runs the collective `kind` with the algorithm `name`. `hierarchical` needs `node`, the number
    of ranks per node, which must divide the group size."""
    if name != "hierarchical":
        return ALGORITHMS[kind][name]
    assert node
    return partial(_with_node, HIERARCHICAL[kind], node)


def _with_node(whole: Callable[[Port, Tensor, int], None], node: int, port: Port, x: Tensor) -> None:
    whole(port, x, node)


def sent_bytes(kind: str, name: str, port: Port, x: Tensor, node: int | None = None) -> int:
    """Bytes that this rank sends in the collective."""
    return x.element_size() * sent_elements(kind, name, port.rank, port.size, x.numel(), node)
