"""Keeps the newest all-to-all matrix of a run and a few older ones, in bounded memory.

A matrix contains the bytes that each rank sent to every other rank in one sampled step; a row contains those that one
rank sent. A matrix is divided into square blocks (tiles). Its totals, its sums by node and, for each tile, the pair of
ranks with the most bytes (the largest pair) are updated with each row, so that a screen never has to read all pairs.
The newest matrices also keep their rows; an older matrix whose rows would exceed the bound keeps only its totals, sums
by node and largest pairs.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from agents.protocol import Hello, Peers, Summary, Update
from agents.state.encoded_records import EncodedRecords
from agents.state.run_state import RunState

KEPT = 12  # maximum number of matrices
RECENT = 4  # how many of these are the newest matrices; the others are spread over the run
PAIRS = 100_000  # maximum number of pairs in the rows of the older matrices, about 1 MB
TILES = 256  # maximum number of tiles per side of a matrix
RUNS_AHEAD = 2  # number of steps by which a step's records may arrive ahead of the summaries


class Pair(NamedTuple):
    """Bytes that one rank sent to another."""

    bytes: int
    source: int
    destination: int


def hotter(pair: Pair) -> tuple[int, int, int]:
    """Sort key of a pair: its bytes; of two pairs with equal bytes, the one with the lower rank numbers is regarded as
    the larger."""
    return pair.bytes, -pair.source, -pair.destination


@dataclass
class Matrix:
    """The all-to-all bytes of one step. `tile`: the side, in ranks, of the square tiles into which the matrix is
    divided; 1 keeps every pair of ranks. `serial`: a counter, unique even if a resumed run repeats the step."""

    step: int
    tile: int
    serial: int = 0
    # by source; empty after `condense`
    rows: EncodedRecords[Peers] = field(default_factory=lambda: EncodedRecords(Peers))
    sent: dict[int, int] = field(default_factory=dict)  # by source, for each rank whose row has arrived
    received: dict[int, int] = field(default_factory=dict)  # by destination
    nodes: dict[tuple[str, str], int] = field(default_factory=dict)  # (host, host) -> bytes
    tiles: dict[tuple[int, int], Pair] = field(default_factory=dict)  # (row, column) of tiles -> largest pair
    pairs: int = 0  # pairs with bytes
    condensed: bool = False

    def add(self, row: Peers, hosts: dict[int, str]) -> bool:
        """Add the bytes that one rank sent to each other rank (a row of the matrix). Returns False if the matrix
        already has this row."""
        source = row.rank
        if source in self.sent:
            return False
        received, tile, mine = self.received, self.tile, hosts.get(source, "")
        total = count = 0
        # Neighbouring ranks share a host and a tile, so each sum is added to its dictionary only when the host or the
        # tile changes. A row of 63 pairs then takes 20 us; updating two dictionaries for each pair would take three
        # times as long.
        host, of_host = "", 0
        column, largest, hottest = -1, 0, -1
        for to in row.sent:
            peer, size = to.peer, to.bytes
            if not size or peer == source:
                continue
            received[peer] = received.get(peer, 0) + size
            count += 1
            total += size
            theirs = hosts.get(peer, "")
            if theirs != host:
                self._add_between(mine, host, of_host)
                host, of_host = theirs, 0
            of_host += size
            if peer // tile != column:
                self._keep_largest(Pair(largest, source, hottest))
                column, largest, hottest = peer // tile, 0, -1
            if size > largest:
                largest, hottest = size, peer
        self._add_between(mine, host, of_host)
        self._keep_largest(Pair(largest, source, hottest))
        self.pairs += count
        self.sent[source] = total
        self.rows[source] = row
        return True

    def _add_between(self, source: str, destination: str, size: int) -> None:
        if size:
            self.nodes[source, destination] = self.nodes.get((source, destination), 0) + size

    def _keep_largest(self, pair: Pair) -> None:
        key = (pair.source // self.tile, pair.destination // self.tile)
        if pair.bytes and ((known := self.tiles.get(key)) is None or hotter(pair) > hotter(known)):
            self.tiles[key] = pair

    def condense(self) -> None:
        """Drop the rows. If tiles hold more than one pair of ranks, only the pair with the most bytes of each tile is
        kept."""
        if self.tile > 1:
            self.condensed = True
        self.rows = EncodedRecords(Peers)

    def copy(self) -> "Matrix":
        """A copy that does not change when rows are added to the original."""
        return replace(
            self,
            rows=self.rows.copy(),
            sent=self.sent.copy(),
            received=self.received.copy(),
            nodes=self.nodes.copy(),
            tiles=self.tiles.copy(),
        )

    @property
    def version(self) -> tuple[int, int, bool]:
        """A key that changes whenever this matrix changes."""
        return self.serial, len(self.sent), self.condensed

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    @property
    def hottest(self) -> Pair | None:
        """The pair with the most bytes; None if no rank sent anything."""
        return max(self.tiles.values(), default=None, key=hotter)

    def between(self, rows: Container[int], columns: Container[int], coarse: bool) -> Iterator[Pair]:
        """The pairs with traffic whose source is in `rows` and whose destination is in `columns`. If `coarse` is true,
        or if `condense` has dropped the bytes of the other pairs, consider only the pair with the most bytes in each
        tile."""
        if self.tile == 1 or self.condensed or coarse:
            for pair in self.tiles.values():
                if pair.source in rows and pair.destination in columns:
                    yield pair
            return
        for source in self.rows:
            if source in rows:
                for to in self.rows[source].sent:
                    if to.bytes and to.peer in columns and to.peer != source:
                        yield Pair(to.bytes, source, to.peer)

    def bytes_between(self, source: int, destination: int) -> int | None:
        """Bytes that `source` sent to `destination`; None if the row of `source` is missing or the matrix does not keep
        this pair."""
        if source not in self.sent:
            return None
        largest = self.tiles.get((source // self.tile, destination // self.tile))
        if largest is None:
            return 0
        if (largest.source, largest.destination) == (source, destination):
            return largest.bytes
        if self.tile == 1:
            return 0
        row = self.rows.get(source)
        return sum(to.bytes for to in row.sent if to.peer == destination) if row else None


def tile_of(world: int) -> int:
    """The side of a tile, in ranks: the smallest power of two that divides a matrix of `world` ranks into at most
    `TILES` tiles per side. Because this number is a power of two, larger squares on the screen consist of whole
    tiles."""
    return 1 << (max(1, -(-world // TILES)) - 1).bit_length()


class TrafficHistory:
    """The all-to-all matrices of a run by step: the newest ones, and some earlier ones spread over the run."""

    def __init__(self) -> None:
        self.matrices: dict[int, Matrix] = {}  # by step, in ascending order
        self._newest: dict[int, int] = {}  # step of the newest row of each rank
        self._hosts: dict[int, str] = {}
        self._world = 0
        self._summary = -1  # step of the newest summary
        self._made = 0  # matrices so far

    def note(self, update: Update) -> None:
        """Record the all-to-all data of the update; updates without such data are ignored."""
        match update:
            case Peers():
                self._add(update)
            case Hello():
                self._hosts[update.rank] = update.host
                self._world = max(self._world, update.world)
            case Summary():
                if update.step < self._summary:  # the run resumed from an earlier checkpoint
                    self.cut(update.step + RUNS_AHEAD)
                self._summary = update.step

    def adopt(self, state: RunState) -> None:
        """Drop data newer than `state`, because the hub has restarted or the user has jumped back in a recording. The
        caller must then pass the updates of `state` to `note`."""
        self._summary = -1
        self._hosts = {rank: hello.host for rank, hello in state.hellos.items()}
        self._world = state.world
        self.cut(max((row.step for row in state.peers.values()), default=-1) + 1)

    def cut(self, step: int) -> None:
        """Drop the matrices from `step` on, because the run repeats these steps."""
        for old in [old for old in self.matrices if old >= step]:
            del self.matrices[old]
        for rank, newest in self._newest.items():
            self._newest[rank] = min(newest, step - 1)

    def copy(self) -> "TrafficHistory":
        """A copy that does not change when updates are added to the original."""
        still = TrafficHistory()
        still.matrices = {step: matrix.copy() for step, matrix in self.matrices.items()}
        still._newest, still._hosts = self._newest.copy(), self._hosts.copy()
        still._world, still._summary, still._made = self._world, self._summary, self._made
        return still

    @property
    def shown(self) -> Matrix | None:
        """The newest matrix, or the previous matrix while rows of the newest matrix are still arriving."""
        newest = list(self.matrices.values())[-2:]
        return max(newest, key=lambda matrix: (len(matrix.sent), matrix.step), default=None)

    def at(self, step: int | None) -> Matrix | None:
        """The newest kept matrix whose step is not after `step`, or None if there is none. If `step` is None, the same
        as the property `shown`."""
        if step is None:
            return self.shown
        return max((one for one in self.matrices.values() if one.step <= step), key=_step, default=None)

    def _add(self, row: Peers) -> None:
        newest = self._newest.get(row.rank, -1)
        if row.step < newest:
            self.cut(row.step)  # the run resumed from an earlier checkpoint
        self._newest[row.rank] = row.step
        matrix = self.matrices.get(row.step)
        if matrix is None:
            self._made += 1
            matrix = self.matrices[row.step] = Matrix(row.step, tile_of(self._world), self._made)
            if row.step < max(self.matrices):
                self.matrices = dict(sorted(self.matrices.items()))
            self._bound()
        if matrix.add(row, self._hosts):
            older = list(self.matrices.values())[:-1]
            if older and older[-1].rows and len(matrix.sent) == len(older[-1].sent):
                self._bound()

    def _bound(self) -> None:
        while len(self.matrices) > KEPT:
            # Drop the matrix without which the gap between its neighbours is smallest; the oldest stays.
            steps = list(self.matrices)[: -RECENT + 1]
            gaps = [
                (after - before, step)
                for before, step, after in zip(steps, steps[1:], steps[2:], strict=False)
            ]
            del self.matrices[min(gaps)[1]]
        newest = list(self.matrices.values())[::-1]
        # While the rows of the newest matrix arrive, the previous matrix is shown.
        arriving = len(newest) > 1 and len(newest[0].sent) < len(newest[1].sent)
        held = 0
        for matrix in newest[1 + arriving :]:
            held += matrix.pairs
            if matrix.rows and (held > PAIRS or matrix.tile == 1):
                matrix.condense()


def _step(matrix: Matrix) -> int:
    return matrix.step
