"""Which expert of a layer goes where: arithmetic on counts of (token, expert) pairs, no torch.

A slot is (ep rank, index there), numbered ep rank by ep rank; a *map* says for each slot the logical expert in it, and
every rank has equally many. `sent[r][e]` are the pairs that rank r's tokens send to expert e.

Evening out the load of ranks under equal counts is a partition problem (NP-hard): longest processing time first gives
each expert, heaviest first, to the least loaded rank that has room (Graham 1969).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

SLACK = 1.05  # what a map for traffic may cost in load over the evenest one

Map = list[int]
Sent = NDArray[np.float64]
"""[ep ranks, experts]"""


def plan_map(goal: str, now: Map, sent: Sent) -> Map:
    """The map for `goal`, a key of GOALS; the same on all ranks that plan from the same numbers.

    Of those for load and traffic the most loaded rank never has more than `now`, and experts that need not move stay.
    """
    return GOALS[goal](now, sent)


def rank_loads(logical: Map, sent: Sent) -> list[float]:
    """Pairs that each ep rank's experts get."""
    load = sent.sum(0)[logical]
    return [float(x) for x in load.reshape(len(sent), -1).sum(1)]


def imbalance(logical: Map, sent: Sent) -> float:
    """Load of the most loaded rank over the mean, 1 where nothing was sent."""
    loads = rank_loads(logical, sent)
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def local_share(logical: Map, sent: Sent) -> float:
    """Share of the pairs that stay on the rank they come from, 0..1."""
    ranks = _ranks_of(logical, len(sent))
    stays = sent[ranks, np.arange(len(ranks))].sum()
    return float(stays / sent.sum()) if sent.any() else 0.0


def slots_per_rank(experts: int, ep: int, efsdp: int) -> list[range]:
    """The slots whose experts each rank of a stage holds, rank = efsdp index x ep + ep index.

    An ep rank's stack of experts is cut along dim 0 into efsdp chunks as `torch.chunk` cuts; the last may be empty.
    """
    stack = experts // ep
    chunk = -(-stack // efsdp)
    cuts = [min(n * chunk, stack) for n in range(efsdp + 1)]
    return [range(e * stack + cuts[f], e * stack + cuts[f + 1]) for f in range(efsdp) for e in range(ep)]


def _ranks_of(logical: Map, ranks: int) -> list[int]:
    """Expert -> ep rank."""
    per_rank = len(logical) // ranks
    rank_of = [0] * len(logical)
    for slot, expert in enumerate(logical):
        rank_of[expert] = slot // per_rank
    return rank_of


def _by_load(now: Map, sent: Sent) -> Map:
    return _settled(_even(_ranks_of(now, len(sent)), sent), now, len(sent))


def _by_traffic(now: Map, sent: Sent) -> Map:
    return _settled(_at_home(_ranks_of(now, len(sent)), sent), now, len(sent))


def _logical(now: Map, sent: Sent) -> Map:
    return sorted(now)


GOALS: dict[str, Callable[[Map, Sent], Map]] = {"load": _by_load, "traffic": _by_traffic, "logical": _logical}


def _even(now: list[int], sent: Sent) -> list[int]:
    """Expert -> rank, each with equally many and about equal load."""
    ranks, load = len(sent), sent.sum(0)
    rank_of = [0] * len(now)
    total, room = [0.0] * ranks, [len(now) // ranks] * ranks
    for expert in sorted(range(len(now)), key=lambda e: (-load[e], e)):
        rank = min((r for r in range(ranks) if room[r]), key=lambda r: (total[r], r))
        rank_of[expert] = rank
        total[rank] += load[expert]
        room[rank] -= 1
    rank_of = _renamed(rank_of, now, ranks)
    return rank_of if _most(rank_of, sent) < _most(now, sent) else now


def _at_home(now: list[int], sent: Sent) -> list[int]:
    """Expert -> rank: from the evenest map, the swap of two experts that keeps most pairs at home, again and again.

    Each swap keeps more pairs at home than before, so this ends; the most loaded rank stays within SLACK.
    """
    rank_of = np.array(_even(now, sent))
    load, experts = sent.sum(0), np.arange(len(now))
    most = min(_most(now, sent), SLACK * _most(rank_of.tolist(), sent))
    while True:
        total = np.bincount(rank_of, load, len(sent))
        home = sent[rank_of].T  # [a, b]: pairs of expert a that would stay at home on the rank of b
        gain = home + home.T - (home[experts, experts][:, None] + home[experts, experts][None, :])
        grows = (
            total[rank_of][:, None] - load[:, None] + load[None, :]
        )  # of the rank of a, were b in its place
        gain[(grows > most) | (most < grows.T)] = 0.0
        a, b = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[a, b] <= 1e-9 * sent.sum():
            return [int(rank) for rank in rank_of]
        rank_of[[a, b]] = rank_of[[b, a]]


def _most(rank_of: list[int], sent: Sent) -> float:
    return float(np.bincount(rank_of, sent.sum(0), len(sent)).max())


def _renamed(rank_of: list[int], now: list[int], ranks: int) -> list[int]:
    """The same groups of experts under the ranks that have most of them already."""
    common = np.zeros((ranks, ranks), dtype=np.int64)
    np.add.at(common, (rank_of, now), 1)
    name: dict[int, int] = {}
    for group, rank in sorted(np.ndindex(ranks, ranks), key=lambda pair: (-common[pair], pair)):
        if group not in name and rank not in name.values():
            name[group] = rank
    return [name[group] for group in rank_of]


def _settled(rank_of: Sequence[int], now: Map, ranks: int) -> Map:
    """A map with each expert on its rank: who stays on its rank keeps its slot, the others fill what is free."""
    per_rank = len(now) // ranks
    settled = [expert if rank_of[expert] == slot // per_rank else -1 for slot, expert in enumerate(now)]
    stays = set(settled)
    coming = [[e for e in sorted(now) if rank_of[e] == rank and e not in stays] for rank in range(ranks)]
    for slot, expert in enumerate(settled):
        if expert < 0:
            settled[slot] = coming[slot // per_rank].pop(0)
    return settled
