"""Every collective algorithm computes the exact result in its stated order of additions, for any size, number of ranks
and dtype, and sends the stated number of bytes."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.collectives.parts import Fold, edges, sent_elements
from engine.collectives.port import Port, Traffic
from engine.collectives.table import algorithm, names, sent_bytes
from engine.planner.hardware.description import Device, Hardware, Link
from engine.planner.timing.collectives import sent_by_level
from engine.planner.timing.costs import cost, power_of_two
from tests.unit.engine.collectives.thread_port import on_ranks

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
CASES = [(kind, name) for kind in KINDS for name in names(kind, 1)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def inputs(ranks: int, elements: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(ranks * 1000 + elements)
    return [torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def ran(kind: str, name: str, given: list[Tensor], node: int | None = None) -> list[tuple[Tensor, Traffic]]:
    """Run a collective, and check that each rank sends as many bytes as the formula gives. Returns each rank's buffer
    afterwards, and its traffic."""

    def work(port: Port) -> tuple[Tensor, Traffic]:
        x = given[port.rank].clone()
        algorithm(kind, name, node)(port, x)
        assert port.traffic.sent_bytes == sent_bytes(kind, name, port, x, node)
        return x, port.traffic

    return on_ranks(len(given), work)


def nodes_of(ranks: int) -> list[int]:
    return [node for node in range(1, ranks + 1) if ranks % node == 0]


def part(x: Tensor, rank: int, ranks: int) -> Tensor:
    first, after = edges(x.numel(), ranks)[rank : rank + 2]
    return x[first:after]


def check(kind: str, name: str, ranks: int, elements: int, dtype: torch.dtype, node: int | None) -> None:
    given = [x.round() for x in inputs(ranks, elements, dtype)]  # small whole numbers: every sum is exact
    total = torch.stack(given).sum(0)
    gathered = torch.cat([part(x, rank, ranks) for rank, x in enumerate(given)])
    for rank, (x, _) in enumerate(ran(kind, name, given, node)):
        if kind == "reduce_scatter":
            assert part(x, rank, ranks).equal(part(total, rank, ranks))
        else:
            assert x.equal(total if kind == "all_reduce" else gathered)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind} {name}" for kind, name in CASES])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
def test_an_algorithm_is_exact_and_sends_the_bytes_of_its_formula(kind: str, name: str, ranks: int) -> None:
    """The buffer sizes are below, at and above the number of ranks, and not all are multiples of it."""
    for node in nodes_of(ranks) if name == "hierarchical" else [None]:
        for elements in (1, ranks - 1, ranks, 4 * ranks, 4 * ranks + 3):
            check(kind, name, ranks, elements, DTYPES[elements % 3], node)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 17), st.integers(0, 60), st.sampled_from(DTYPES), st.data())
def test_any_ranks_and_any_size(
    case: tuple[str, str], ranks: int, elements: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    node = data.draw(st.sampled_from(nodes_of(ranks))) if case[1] == "hierarchical" else None
    check(*case, ranks, elements, dtype, node)


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[1] != "hierarchical"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8])
def test_steps_and_bytes_are_those_of_the_planner(kind: str, name: str, ranks: int) -> None:
    """If the buffer divides evenly, the maximum over the ranks equals the planner's numbers of steps and bytes."""
    elements = 840 * power_of_two(ranks)
    traffic = [one for _, one in ran(kind, name, inputs(ranks, elements))]
    found = cost(kind, name, ranks)
    assert max(one.steps for one in traffic) == found.steps
    assert max(one.longest for one in traffic) == pytest.approx(found.sent * elements * 8, rel=1e-12)


@pytest.mark.parametrize(("ranks", "node"), [(8, 4), (8, 2), (6, 3), (12, 4)])
def test_hierarchical_bytes_by_level_are_those_of_the_planner(ranks: int, node: int) -> None:
    """In an all-reduce of n bytes, a rank sends 2 n (r-1)/r bytes inside a node and 2 n/r (N-1)/N bytes between nodes
    (`sent_by_level`); in a reduce-scatter or an all-gather, it sends half as many."""
    machine = Hardware(
        "two levels",
        Device(1.0, 1.0, {"fp32": 1.0}, ""),
        (Link("in", node, 0, 1.0, ""), Link("out", None, 0, 1.0, "")),
    )
    elements = 5 * ranks
    for kind in KINDS:
        (inside, _), (outside, _) = sent_by_level(kind, elements, 1, ranks, 1, machine)
        for rank in range(ranks):
            assert sent_elements(kind, "hierarchical", rank, ranks, elements, node) == pytest.approx(
                inside + outside
            )


@pytest.mark.parametrize("ranks", [2, 4, 8, 64, 100])
def test_no_algorithm_sends_less_than_the_bandwidth_optimum(ranks: int) -> None:
    """Patarasu and Yuan 2009, theorem 1: all ranks together send at least 2 (P-1) n in an all-reduce. A ring sends
    exactly this minimum, and so does halving-doubling if P is a power of two."""
    elements = 64 * 100
    for name in names("all_reduce"):
        total = sum(sent_elements("all_reduce", name, rank, ranks, elements) for rank in range(ranks))
        assert total >= 2 * (ranks - 1) * elements
        if name == "ring" or (name == "halving-doubling" and power_of_two(ranks) == ranks):
            assert total == 2 * (ranks - 1) * elements


# ------------------------------------------------------------------------------------------- order of sums


def ring_sum(given: list[Tensor]) -> Tensor:
    """The sum as a ring computes it: the partial sum of the c-th chunk of the vector starts at rank c + 1, passes every
    rank in order, and ends at rank c."""
    ranks = len(given)
    return torch.cat(
        [
            reduce(torch.add, [part(given[(c + n) % ranks], c, ranks) for n in range(1, ranks + 1)])
            for c in range(ranks)
        ]
    )


def tree_sum(given: list[Tensor]) -> Tensor:
    sums, distance = list(given), 1
    while distance < len(sums):
        for rank in range(0, len(sums) - distance, 2 * distance):
            sums[rank] = sums[rank] + sums[rank + distance]
        distance *= 2
    return sums[0]


def folded(given: list[Tensor]) -> list[Tensor]:
    fold = Fold(len(given))
    return [
        given[2 * n] + given[2 * n + 1] if n < fold.extra else given[n + fold.extra]
        for n in range(fold.power)
    ]


def doubling_sum(given: list[Tensor]) -> Tensor:
    return tree_sum(folded(given))  # rank 0 adds the sums at distance 1, 2, 4, ...


def halving_sum(given: list[Tensor]) -> Tensor:
    """The sum as recursive halving computes it: each chunk of the vector is summed over pairs of ranks at distance p/2,
    then p/4, ..., 1."""
    sums = folded(given)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [sums[n] + sums[n + half] for n in range(half)]
    return sums[0]


ORDERS = {
    "naive": lambda given: reduce(torch.add, given),
    "tree": tree_sum,
    "ring": ring_sum,
    "doubling": doubling_sum,
    "halving-doubling": halving_sum,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
def test_sums_have_the_stated_order_and_are_the_same_bits_on_every_rank(
    name: str, ranks: int, dtype: torch.dtype
) -> None:
    given = inputs(ranks, 37, dtype)
    expected = ORDERS[name](given)
    for x, _ in ran("all_reduce", name, given):
        assert x.equal(expected)


def test_the_orders_differ() -> None:
    """The orders of addition must give different sums; otherwise the test above could not distinguish them."""
    given = inputs(5, 37, torch.bfloat16)
    sums = [order(given) for order in ORDERS.values()]
    assert not any(sums[a].equal(sums[b]) for a in range(len(sums)) for b in range(a))


@pytest.mark.parametrize("node", [1, 2, 3, 6])
def test_hierarchical_sums_are_the_same_bits_on_every_rank(node: int) -> None:
    first, *others = [x for x, _ in ran("all_reduce", "hierarchical", inputs(6, 37, torch.bfloat16), node)]
    assert all(other.equal(first) for other in others)
