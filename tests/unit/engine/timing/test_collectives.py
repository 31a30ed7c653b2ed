"""Tests the closed-form costs of collectives against the literature and the source documents, and tests properties that
hold for any size.

The source documents are those that test_source_texts_communication.py lists.
"""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.planner.hardware.description import Device, Hardware, Link
from engine.planner.hardware.table import hardware
from engine.planner.timing.collectives import choose, collective_time, dispatch_time, domains
from engine.planner.timing.costs import ALGORITHMS, cost

NVLINK4 = Link("NVLink", None, 1e-6, 450e9, "NVLink 4.0")
ONE_LEVEL = Hardware("one level", Device(80e9, 3e12, {"bf16": 1e15}, "test"), (NVLINK4,))
SIZES = st.floats(1, 1e11)
RANKS = st.integers(2, 512)
KINDS = st.sampled_from(sorted(ALGORITHMS))
MACHINES = st.sampled_from(["A100-80", "H100", "GB200", "H100/roce-100"])


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_ring_all_reduce_sends_two_shares_of_the_buffer(ranks: int) -> None:
    """A ring all-reduce takes 2 (P-1) steps, in which each rank sends 2 (P-1)/P n bytes (Thakur et al. 2005, section
    4.5)."""
    assert cost("all_reduce", "ring", ranks) == (
        2 * (ranks - 1),
        2 * (ranks - 1) / ranks,
        (ranks - 1) / ranks,
    )


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_all_reduce_is_reduce_scatter_and_all_gather(ranks: int) -> None:
    """With each bandwidth-optimal algorithm, an all-reduce costs as much as a reduce-scatter plus an all-gather.

    Source: Chan et al. 2007, table III.
    """
    for whole, first, second in (("ring", "ring", "ring"), ("halving-doubling", "halving", "doubling")):
        scatter, gather = cost("reduce_scatter", first, ranks), cost("all_gather", second, ranks)
        both = [a + b for a, b in zip(scatter, gather, strict=True)]
        assert both == pytest.approx(cost("all_reduce", whole, ranks))


@pytest.mark.parametrize("ranks", [4, 8, 16, 1024])
def test_halving_and_doubling_has_logarithmic_latency_and_the_rings_bytes(ranks: int) -> None:
    found = cost("all_reduce", "halving-doubling", ranks)
    assert found.steps == 2 * log2(ranks)
    assert found.sent == 2 * (ranks - 1) / ranks


def test_counts_that_are_no_power_of_two_make_halving_worse_than_a_ring_of_large_buffers() -> None:
    assert cost("all_reduce", "halving-doubling", 6).sent > cost("all_reduce", "ring", 6).sent


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (8, 7), (64, 63)])
def test_direct_all_to_all_sends_to_each_rank(ranks: int, steps: int) -> None:
    assert cost("all_to_all", "direct", ranks) == (steps, (ranks - 1) / ranks, 0)


def test_a_gigabyte_over_nvlink_4_takes_2_2_ms() -> None:
    """According to section 5.1 of the roofline guide (text D in test_source_texts_communication.py), the time is
    alpha + 1 GB x 2.22 ps/byte."""
    assert collective_time("send", 1e9, 2, 1, _with_share(1.0)) == pytest.approx(2.22e-3, rel=2e-3)


@pytest.mark.parametrize(
    ("alpha", "gigabytes", "kilobytes"),
    [(1.0, 450, 450), (1.5, 200, 300), (5.0, 12.5, 62.5), (50, 12.5, 625)],
)
def test_crossover_of_latency_and_bandwidth(alpha: float, gigabytes: float, kilobytes: float) -> None:
    """The code in section 5.3 of the roofline guide (text D in test_source_texts_communication.py) computes the
    crossover size as n* = alpha / beta, which is right. The figure in that section shows 2-5 KB for NVLink, which is
    wrong."""
    link = Link("link", None, alpha * 1e-6, gigabytes * 1e9, "text")
    assert link.latency * link.bandwidth == pytest.approx(kilobytes * 1e3)


def test_small_buffers_take_the_algorithm_of_few_steps_and_large_ones_the_fewest_bytes() -> None:
    small, large = (choose("all_reduce", size, 6, 1, ONE_LEVEL)[1] for size in (8, 1e10))
    assert small == "doubling"
    assert large == "ring"


def test_a_group_inside_a_node_does_not_use_the_network() -> None:
    fast, slow = hardware("H100"), hardware("H100/ethernet-25")
    assert collective_time("all_reduce", 1e8, 8, 1, fast) == collective_time("all_reduce", 1e8, 8, 1, slow)
    assert collective_time("all_reduce", 1e8, 16, 1, fast) < collective_time("all_reduce", 1e8, 16, 1, slow)


@pytest.mark.parametrize(
    ("ranks", "stride", "found"),
    [(8, 1, (8, 1)), (16, 1, (8, 2)), (4, 8, (1, 4)), (32, 2, (4, 8)), (64, 4, (2, 32))],
)
def test_domains_of_a_group(ranks: int, stride: int, found: tuple[int, int]) -> None:
    assert domains(ranks, stride, hardware("H100")) == found


def test_a_node_with_more_ranks_of_the_group_has_more_ways_out() -> None:
    """A group with all ranks of a node uses the node's eight network cards; a group with every eighth rank uses one."""
    whole, one = (collective_time("all_gather", 1e10, 64, stride, hardware("H100")) for stride in (1, 8))
    assert one / whole == pytest.approx(8, rel=0.2)


@pytest.mark.parametrize(("kind", "passes"), [("all_gather", 1), ("all_reduce", 2)])
def test_a_ring_over_nodes_sends_as_much_between_them_as_inside_them(kind: str, passes: int) -> None:
    """Each rank sends (P-1)/P of the buffer to the next rank, and the last rank of a node sends it to the next node.
    The bytes that leave a node are spread over its eight network cards."""
    machine = hardware("H100")
    inner, outer = (link.bandwidth * machine.efficiency.link for link in machine.links)
    sent, added = passes * 15 / 16 * 1e11, (passes - 1) * 15 / 16 * 1e11 * 3 / machine.device.memory_bandwidth
    seconds, name = choose(kind, 1e11, 16, 1, machine)
    assert name == "ring" and sent / 8 / outer > sent / inner
    assert seconds == pytest.approx(sent / 8 / outer + added, rel=1e-3)


def test_deduplicated_dispatch_crosses_once_for_each_node() -> None:
    """Eight random experts on 64 ranks are on 5.25 of 8 nodes on average, so a token is sent 4.6 times to other nodes
    instead of 7 times."""
    machine = hardware("H100")
    plain = collective_time("all_to_all", 8e8, 64, 1, machine)
    once = dispatch_time(8e8, 8, 64, 1, machine)
    assert once / plain == pytest.approx(8 * (1 - (7 / 8) ** 8) * (7 / 8) / 7, rel=0.05)


@given(KINDS, SIZES, RANKS, MACHINES)
def test_more_bytes_never_take_less_time(kind: str, size: float, ranks: int, machine: str) -> None:
    known = hardware(machine)
    assert collective_time(kind, size, ranks, 1, known) <= collective_time(
        kind, 2 * size, ranks, 1, known
    ) * (1 + 1e-9)


@given(SIZES, st.integers(1, 9), MACHINES)
def test_the_chosen_algorithm_is_no_slower_than_a_ring(size: float, power: int, machine: str) -> None:
    known, ranks = hardware(machine), 2**power
    inner, outer = known.links[0], known.links[-1]
    slowest = min(inner.bandwidth, outer.bandwidth) * known.efficiency.link
    ring = cost("all_reduce", "ring", ranks)
    most = ring.steps * outer.latency + size * (
        ring.sent / slowest + ring.reduced * 3 / known.device.memory_bandwidth
    )
    assert collective_time("all_reduce", size, ranks, 1, known) <= most * (1 + 1e-9)


@given(KINDS, MACHINES)
def test_one_rank_has_nobody_to_tell(kind: str, machine: str) -> None:
    assert collective_time(kind, 1e9, 1, 1, hardware(machine)) == 0


def test_steps_of_the_double_tree() -> None:
    assert cost("all_reduce", "double tree", 512).steps == 2 * ceil(log2(512))


def _with_share(share: float) -> Hardware:
    return replace(ONE_LEVEL, efficiency=replace(ONE_LEVEL.efficiency, link=share))
