"""The history of all-to-all matrices: exact sums, bounded memory, resumed runs, copies."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from msgspec import structs

from agents.protocol import Peers, ToPeer
from agents.state.run_state import RunState
from cockpit.data import plain
from cockpit.data.history.traffic import KEPT, PAIRS, RECENT, Pair, TrafficHistory, tile_of
from cockpit.data.store import Store
from cockpit.data.traffic.traffic import balance
from tests.screens.fake_run import FakeRun
from tests.unit.agents.fleet import make_hello, make_summary


def row(rank: int, step: int, **sent: int) -> Peers:
    """The bytes that a rank sends to each rank in an all-to-all. The argument ``r3=100`` means 100 bytes to rank 3."""
    return Peers(rank, step, [ToPeer(int(name[1:]), size) for name, size in sent.items()])


def started(world: int, node_ranks: int = 2) -> TrafficHistory:
    history = TrafficHistory()
    for rank in range(world):
        history.note(structs.replace(make_hello(rank, world), host=f"n{rank // node_ranks}"))
    return history


def test_sums_are_those_of_the_rows() -> None:
    """The totals equal the sums over all pairs of ranks, even if the world is so large that a tile of the matrix stands
    for several ranks."""
    world, rng = 600, random.Random(1)
    history = started(world, 8)
    assert tile_of(world) == 4
    pairs = {}
    for rank in range(world):
        peers = rng.sample(range(world), 9)
        sizes = {peer: rng.randrange(1, 10**6) for peer in peers if peer != rank}
        pairs |= {(rank, peer): size for peer, size in sizes.items()}
        history.note(Peers(rank, 20, [ToPeer(peer, size) for peer, size in sizes.items()]))
    matrix = history.shown
    assert matrix is not None and matrix.pairs == len(pairs) and matrix.total == sum(pairs.values())
    sent, received, nodes, tiles = Counter(), Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    for (a, b), size in pairs.items():
        sent[a] += size
        received[b] += size
        nodes[f"n{a // 8}", f"n{b // 8}"] += size
        tiles[a // 4, b // 4] = max(size, tiles[a // 4, b // 4])
    assert (matrix.sent, matrix.received, matrix.nodes) == (sent, received, nodes)
    (a, b), size = max(pairs.items(), key=lambda item: item[1])
    assert matrix.hottest == Pair(size, a, b)
    inside = {
        (p.source, p.destination): p.bytes for p in matrix.between(range(8, 80), range(world), coarse=False)
    }
    assert inside == {key: size for key, size in pairs.items() if key[0] in range(8, 80)}
    coarse = matrix.between(range(world), range(world), coarse=True)
    assert sorted((p.source // 4, p.destination // 4, p.bytes) for p in coarse) == sorted(
        (*at, largest) for at, largest in tiles.items()
    )
    (a, b), size = max(pairs.items(), key=lambda item: item[1])
    assert matrix.bytes_between(a, b) == size
    assert matrix.bytes_between(a, next(p for p in range(world) if (a, p) not in pairs)) == 0


def test_the_matrix_before_is_shown_while_the_newest_arrives() -> None:
    history = started(2)
    history.note(row(0, 20, r1=5))
    history.note(row(1, 20, r0=7))
    history.note(row(0, 40, r1=6))
    assert history.shown and history.shown.step == 20
    history.note(row(1, 40, r0=6))
    assert history.shown.step == 40
    assert [history.at(step) and history.at(step).step for step in (None, 19, 20, 39, 41)] == [
        40,
        None,
        20,
        20,
        40,
    ]


def test_a_resume_drops_the_steps_that_it_repeats() -> None:
    history = started(2)
    for step in (20, 40, 60):
        for rank in (0, 1):
            history.note(row(rank, step, **{f"r{1 - rank}": step}))
    before = history.matrices[40].version
    history.note(row(0, 40, r1=1))
    assert list(history.matrices) == [20, 40] and history.matrices[40].sent == {0: 1}
    history.note(row(1, 40, r0=2))
    assert history.matrices[40].sent == {0: 1, 1: 2}, "the second rank of the resume drops nothing"
    assert history.matrices[40].version != before
    history.note(make_summary(44))
    history.note(make_summary(21))
    assert list(history.matrices) == [20], "a summary that goes back is a resume too"


def test_memory_is_bounded_and_old_matrices_keep_their_sums() -> None:
    world, group = 1024, 64
    history = started(world, 8)
    sent = [
        [
            ToPeer(peer, 1000 + 60 * (peer == 70))
            for peer in range(rank - rank % group, rank - rank % group + group)
        ]
        for rank in range(world)
    ]
    for step in range(0, 20 * (KEPT + 3), 20):
        for rank in range(world):
            history.note(Peers(rank, step, sent[rank]))
    assert len(history.matrices) == KEPT and list(history.matrices)[-RECENT:] == list(range(220, 300, 20))
    assert next(iter(history.matrices)) == 0, "the oldest is kept"
    whole = [matrix for matrix in history.matrices.values() if matrix.rows]
    assert [matrix.step for matrix in whole] == [260, 280]
    assert whole[0].pairs == world * (group - 1) <= PAIRS < 2 * whole[0].pairs
    old = history.matrices[0]
    assert old.condensed and old.sent[5] == 63 * 1000 and old.received[70] == 63 * 1060
    assert old.hottest is not None and (old.hottest.bytes, old.hottest.destination) == (1060, 70)
    assert old.nodes["n8", "n8"] == 56 * 1000 + 7 * 60
    assert old.bytes_between(5, 9) is None and whole[0].bytes_between(5, 9) == 1000, (
        "a pair that is not kept has no number"
    )


def test_the_older_samples_are_spread_over_the_run() -> None:
    history = started(2)
    for step in range(400):
        history.note(row(0, step, r1=1))
    steps = list(history.matrices)
    assert len(steps) == KEPT and steps[0] == 0 and steps[-RECENT:] == [396, 397, 398, 399]
    gaps = [after - before for before, after in pairwise(steps[: -RECENT + 1])]
    assert max(gaps) < 400 / 3, steps


def test_a_frozen_store_keeps_its_matrices() -> None:
    run, store = FakeRun(), Store()
    store.apply(run.story(60))
    still = store.frozen()
    before = still.traffic.shown and dict(still.traffic.shown.sent)
    store.apply(run._peers(rank, 68) for rank in range(8))
    assert store.traffic.shown and store.traffic.shown.step == 68
    assert still.traffic.shown and (still.traffic.shown.step, dict(still.traffic.shown.sent)) == (48, before)


def test_a_playback_that_goes_back_shows_no_later_sample() -> None:
    run, store, early = FakeRun(), Store(), RunState()
    for update in run.story(30):
        early.apply(update)
    store.apply(run.story(100))
    store.adopt(early)
    assert max(store.traffic.matrices) == 28
    store.adopt(RunState())
    assert not store.traffic.matrices


@pytest.mark.parametrize(("hot", "level"), [(None, False), (2, True)])
def test_balance_names_the_busiest(hot: int | None, level: bool) -> None:
    store = Store()
    store.apply(FakeRun(hot_peer=hot, node_ranks=2).story(30))
    assert store.traffic.shown
    found = balance(store.traffic.shown)
    assert found and found.unbalanced is level and found.sender.over_mean == pytest.approx(1, abs=0.01)
    if hot is not None:
        assert found.receiver.rank == found.hottest.destination == hot
        assert found.receiver.over_mean == pytest.approx(1.8 * 8 / 8, rel=0.15)
        assert (plain.all_to_all(store) or {})["receives_most"]["rank"] == hot
    assert found.between_nodes == pytest.approx(2 / 3, abs=0.15)
