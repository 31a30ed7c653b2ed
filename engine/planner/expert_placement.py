"""Plans expert placement: which ep rank holds which expert, from counts of (token, expert) pairs. Torch-free.

A slot is (ep rank, index on that rank); slots are numbered rank by rank. A *map* lists the logical expert in each slot;
every rank has the same number of slots. `sent[r][e]` is the number of (token, expert) pairs that rank r sends to expert
e.

Balancing the load of ranks with equal numbers of experts is a partition problem (NP-hard). The heuristic is longest
processing time first: each expert, heaviest first, goes to the least loaded rank with a free slot (Graham 1969).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

SLACK = 1.05  # for the goal "traffic": maximum load of a rank, relative to that of the balanced map

Map = list[int]
Sent = NDArray[np.float64]
"""[ep ranks, experts]"""


def plan_map(goal: str, now: Map, sent: Sent) -> Map:
    """Plan which expert goes into which slot. `goal`: "load" balances the load of the ranks, "traffic" also sends fewer
    (token, expert) pairs between ranks, and "logical" puts the experts in the order of their numbers. The result is
    deterministic: from the same counts, all ranks plan the same map.

    For the goals "load" and "traffic", the highest load of a rank does not exceed that under the map `now`, and few
    experts move.
    """
    return GOALS[goal](now, sent)


def rank_loads(logical: Map, sent: Sent) -> list[float]:
    """The number of (token, expert) pairs that the experts of each ep rank receive."""
    load = sent.sum(0)[logical]
    return [float(x) for x in load.reshape(len(sent), -1).sum(1)]


def imbalance(logical: Map, sent: Sent) -> float:
    """The highest load of a rank divided by the mean load; 1 if no (token, expert) pairs were sent."""
    loads = rank_loads(logical, sent)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def local_share(logical: Map, sent: Sent) -> float:
    """The share (0 to 1) of the (token, expert) pairs in which the token and the expert are on the same rank."""
    ranks = _ranks_of(logical, len(sent))
    stays = sent[ranks, np.arange(len(ranks))].sum()
    return float(stays / sent.sum()) if sent.any() else 0.0


def experts_of(logical: Map, ep: int, of: int) -> list[int]:
    """The experts that the map `logical` puts on one ep rank. `of`: index of this rank; `ep`: number of ep ranks."""
    each = len(logical) // ep
    return logical[of * each : (of + 1) * each]


def slots_per_rank(experts: int, ep: int, efsdp: int) -> list[range]:
    """For each rank of a pipeline stage, the range of expert slots that it holds. The ranks are numbered i x ep + j,
    where i is the rank's index over efsdp and j is its index over ep.

    The experts of an ep rank are stacked in one tensor, which is split along dim 0 as by `torch.chunk`; the last chunks
    may be empty.
    """
    stack = experts // ep
    chunk = -(-stack // efsdp)
    cuts = [min(n * chunk, stack) for n in range(efsdp + 1)]
    return [range(e * stack + cuts[f], e * stack + cuts[f + 1]) for f in range(efsdp) for e in range(ep)]


def _ranks_of(logical: Map, ranks: int) -> list[int]:
    """The ep rank of each expert."""
    per_rank = len(logical) // ranks
    rank_of = [0] * len(logical)
    for slot, expert in enumerate(logical):
        rank_of[expert] = slot // per_rank
    return rank_of


def _by_load(now: Map, sent: Sent) -> Map:
    return _to_map(_balanced(_ranks_of(now, len(sent)), sent), now, len(sent))


def _by_traffic(now: Map, sent: Sent) -> Map:
    return _to_map(_localized(_ranks_of(now, len(sent)), sent), now, len(sent))


def _logical(now: Map, sent: Sent) -> Map:
    return sorted(now)


GOALS: dict[str, Callable[[Map, Sent], Map]] = {"load": _by_load, "traffic": _by_traffic, "logical": _logical}


def _balanced(now: list[int], sent: Sent) -> list[int]:
    """The rank of each expert, chosen so that all ranks have equally many experts and nearly equal loads."""
    ranks, load = len(sent), sent.sum(0)
    rank_of = [0] * len(now)
    total, room = [0.0] * ranks, [len(now) // ranks] * ranks
    for expert in sorted(range(len(now)), key=lambda e: (-load[e], e)):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (total[r], r))
        rank_of[expert] = rank
        total[rank] += load[expert]
        room[rank] -= 1
    rank_of = _matched_to_ranks(rank_of, now, ranks)
    return rank_of if _max_load(rank_of, sent) < _max_load(now, sent) else now


def _localized(now: list[int], sent: Sent) -> list[int]:
    """The rank of each expert, chosen so that few (token, expert) pairs are sent between ranks. A greedy search starts
    from the balanced map and repeatedly swaps the two experts whose swap makes the most pairs local, until no swap
    makes more pairs local. The highest load of a rank is at most SLACK times the highest load under the balanced map.
    """
    rank_of = np.array(_balanced(now, sent))
    load, experts = sent.sum(0), np.arange(len(now))
    most = min(_max_load(now, sent), SLACK * _max_load(rank_of.tolist(), sent))
    while True:
        total = np.bincount(rank_of, load, len(sent))
        home = sent[rank_of].T  # [a, b]: local pairs of expert a if it were on the rank of b
        gain = home + home.T - (home[experts, experts][:, None] + home[experts, experts][None, :])
        # [a, b]: load of the rank of a if b replaced a.
        grows = total[rank_of][:, None] - load[:, None] + load[None, :]
        gain[(grows > most) | (most < grows.T)] = 0.0
        a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[a, b] <= 1e-9 * sent.sum():
            return [int(rank) for rank in rank_of]
        rank_of[[a, b]] = rank_of[[b, a]]


def _max_load(rank_of: list[int], sent: Sent) -> float:
    return float(np.bincount(rank_of, sent.sum(0), len(sent)).max())


def _matched_to_ranks(rank_of: list[int], now: list[int], ranks: int) -> list[int]:
    """Assign the planned groups of experts to ranks such that few experts have to move. `rank_of`: for each expert, the
    index of its planned group (the experts that are to share a rank). `now`: the current rank of each expert."""
    common = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(common, (rank_of, now), 1)
    name: dict[int, int] = {}
    for group, rank in sorted(np.ndindex(ranks, ranks), key=lambda pair: (-common[pair], pair)):
        if group not in name and rank not in name.values():
            name[group] = rank
    return [name[group] for group in rank_of]


def _to_map(rank_of: Sequence[int], now: Map, ranks: int) -> Map:
    """A map in which each expert is on the rank that `rank_of` gives. An expert that stays on its rank keeps
    its slot; the others get free slots.
    """
    per_rank = len(now) // ranks
    settled = [expert if rank_of[expert] == slot // per_rank else -1 for slot, expert in enumerate(now)]
    stays = set(settled)
    coming = [[e for e in sorted(now) if rank_of[e] == rank and e not in stays] for rank in range(ranks)]
    for slot, expert in enumerate(settled):
        if expert < 0:
            settled[slot] = coming[slot // per_rank].pop(0)
    return settled
