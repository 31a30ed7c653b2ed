"""The traffic of a run: the balance of the all-to-all, and the traffic of each axis."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agents.protocol import Summary, Traffic
from cockpit.data.history.traffic import Matrix, Pair
from cockpit.data.store import Store, Topic

ORDER = ("tp", "ep", "cp", "pp", "dp", "control")
UNITS = (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
TREND = 256  # steps that a trend shows, if the run has them
# Ratio of the busiest rank to the mean from which it is marked, because all ranks wait for it.
UNBALANCED = 1.5


def byte_unit(most: float, least: str = "B") -> tuple[str, float]:
    """The unit in which a column shows bytes, such as MB, and its size in bytes: the largest unit in which the value
    `most` is at least ten, but no smaller unit than `least`."""
    for unit, size in UNITS:
        if most >= 10 * size or unit == least:
            return unit, size
    return UNITS[-1]


# ------------------------------------------------------------------------------------------- all-to-all


class Most(NamedTuple):
    """The rank with the most bytes, and its bytes relative to the mean."""

    rank: int
    over_mean: float


@dataclass(frozen=True)
class Balance:
    """How evenly the bytes of one traffic matrix (sender x receiver) are spread over the ranks. `between_nodes`: the
    fraction of the bytes that is sent between nodes; None if the host of a rank is unknown. `mean_pair`: mean bytes
    over the pairs that exchange data.
    """

    total: int
    mean_pair: float
    hottest: Pair
    sender: Most
    receiver: Most
    between_nodes: float | None

    @property
    def hottest_over_mean(self) -> float:
        return self.hottest.bytes / self.mean_pair

    @property
    def unbalanced(self) -> bool:
        return max(self.sender.over_mean, self.receiver.over_mean) >= UNBALANCED


def balance(matrix: Matrix) -> Balance | None:
    """How evenly the bytes of a traffic matrix are spread; None if no rank sent anything. `receiver.over_mean` is
    relative to the mean over all ranks that send or receive data."""
    hottest, total = matrix.hottest, matrix.total
    if hottest is None:
        return None
    senders = {rank: size for rank, size in matrix.sent.items() if size}
    taking_part = len(senders.keys() | matrix.received.keys())
    known = all(all(hosts) for hosts in matrix.nodes)
    crossing = sum(size for (a, b), size in matrix.nodes.items() if a != b)
    return Balance(
        total,
        total / matrix.pairs,
        hottest,
        _most(senders, len(senders)),
        _most(matrix.received, taking_part),
        crossing / total if known else None,
    )


def _most(sizes: Mapping[int, int], count: int) -> Most:
    rank = max(sizes, key=lambda one: (sizes[one], -one))
    return Most(rank, sizes[rank] * count / sum(sizes.values()))


def sample_balance(store: Store, matrix: Matrix) -> Balance | None:
    """The result of `balance` for a traffic matrix of the run, recomputed only when the matrix has changed."""
    return store.once(("balance", matrix.step), (), lambda: balance(matrix), also=matrix.version)


def hosts_of(store: Store) -> dict[str, list[int]]:
    """The ranks of each host; hosts are in the order of their first rank."""

    def find() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for rank, hello in sorted(store.state.hellos.items()):
            found.setdefault(hello.host, []).append(rank)
        return found

    return store.once("hosts", (Topic.GRID,), find)


def idle_ranks(store: Store, matrix: Matrix) -> frozenset[int]:
    """The ranks that report zero all-to-all bytes and have no row in the traffic matrix, such as those of a stage
    without experts."""

    def find() -> frozenset[int]:
        steps = store.state.steps
        return frozenset(
            rank for rank, step in steps.items() if step.a2a_bytes == 0 and rank not in matrix.sent
        )

    return store.once(("idle", matrix.step), (), find, also=(matrix.version, len(store.state.steps)))


def sampled_rows(store: Store, matrix: Matrix) -> int:
    """Number of ranks whose row of the traffic matrix (the bytes that they sent to each rank) is known. This includes
    the ranks that report zero bytes and send no row."""
    return len(matrix.sent) + len(idle_ranks(store, matrix))


def expected(store: Store) -> bool:
    """Whether a traffic matrix is to be expected, because the run has sent one before or reports all-to-all bytes."""
    summary = store.summary
    return bool(store.traffic.matrices) or bool(summary and summary.a2a_bytes)


def why_none(store: Store) -> str:
    """Why there is no traffic matrix, and what the user can do."""
    if store.summary is None and not store.traffic.matrices:
        return "no step is done yet"
    if not expected(store):
        hellos = store.state.hellos.values()
        if store.fact("experts") == 0:
            return "no all-to-all in this run: the model has no experts"
        if store.fact("experts") and all(hello.coords.get("ep") == 0 for hello in hellos):
            return "no all-to-all in this run: ep = 1, so each rank has all experts"
        return "this run reports no all-to-all"
    if store.playback_position:
        return "no all-to-all sample was recorded up to here; the first comes later, or the run sent none"
    return "no all-to-all sample yet: ranks send one within a few steps while this screen is open"


# ---------------------------------------------------------------------------------------------- by axis


def axes_with_traffic(comm: Mapping[str, Traffic]) -> list[str]:
    """Axes with traffic, in a fixed order."""
    used = {axis for axis, traffic in comm.items() if traffic.bytes}
    return [axis for axis in ORDER if axis in used] + sorted(used - set(ORDER))


def summary_at(store: Store, step: int | None) -> Summary | None:
    """The summary of a step (None: the newest step); None if the client does not have the summary of that step."""
    summaries = store.state.summaries
    if step is None:
        return store.summary
    at = bisect_left(summaries, step, key=lambda summary: summary.step)
    return summaries[at] if at < len(summaries) and summaries[at].step == step else None


@dataclass(frozen=True)
class AxisTraffic:
    """Traffic of one axis in a step: bytes summed over ranks, ms averaged over ranks."""

    axis: str
    traffic: Traffic
    step_ms: float
    world: int

    @property
    def overlapped(self) -> float | None:
        """Share of the time in collectives that is hidden behind computation."""
        ms = self.traffic.ms
        return max(0.0, 1 - self.traffic.exposed_ms / ms) if ms > 0 else None

    @property
    def of_step(self) -> float | None:
        return self.traffic.exposed_ms / self.step_ms if self.step_ms > 0 else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes that a rank sends, divided by its time in collectives. The time includes waiting for other ranks, so
        the links are at least this fast.
        """
        ms = self.traffic.ms
        return self.traffic.bytes / self.world / (ms / 1e3) if ms > 0 and self.world else None


def by_axis(summary: Summary, world: int) -> list[AxisTraffic]:
    """The traffic of each axis over which ranks sent data in a step."""
    comm = summary.comm
    axes = axes_with_traffic(comm)
    return [AxisTraffic(axis, comm[axis], summary.step_ms, world) for axis in axes]


class Group(NamedTuple):
    """The size of an axis's largest group, and the maximum number of hosts that one of its groups spans."""

    ranks: int
    hosts: int


def groups(store: Store) -> dict[str, Group]:
    """For each axis, the size of its largest group and the maximum number of hosts that a group spans. The ep axis is
    not a separate dimension of the grid, so `_rows_of_ep` finds its groups."""
    return store.once("axis groups", (Topic.GRID,), lambda: _groups(store))


def _groups(store: Store) -> dict[str, Group]:
    hellos = store.state.hellos
    names = list(next(iter(hellos.values())).coords) if hellos else []
    host_of = [hello.host for hello in hellos.values()]
    columns = {name: [hello.coords.get(name, 0) for hello in hellos.values()] for name in names}
    found = {"control": Group(len(host_of), len(set(host_of)))}
    for axis in names:
        rest = [columns[name] for name in names if name not in (axis, "ep")]
        members: dict[tuple[int, ...], list[str]] = {}
        if axis == "ep":
            parts: Iterator[Sequence[str]] = _rows_of_ep(store)
        else:
            for host, *coords in zip(host_of, *rest, strict=True):
                members.setdefault(tuple(coords), []).append(host)
            parts = iter(members.values())
        each = [(len(hosts), len(set(hosts))) for hosts in parts]
        if each:
            found[axis] = Group(max(ranks for ranks, _ in each), max(hosts for _, hosts in each))
    return found


def _rows_of_ep(store: Store) -> Iterator[list[str]]:
    """The hosts of each ep group; a group begins at each rank whose ep coordinate is 0."""
    hosts: list[str] = []
    for _, hello in sorted(store.state.hellos.items()):
        if hello.coords["ep"] == 0 and hosts:
            yield hosts
            hosts = []
        hosts.append(hello.host)
    if hosts:
        yield hosts


def trend(store: Store, axis: str, columns: int, until: int | None = None) -> list[float | None]:
    """The exposed time of an axis in ms over the newest steps up to `until`: at most `columns` values, oldest first. A
    value for several steps is the maximum over these steps, or None if none of their summaries includes the axis."""
    summaries = store.state.summaries
    if until is not None:
        summaries = summaries[: bisect_left(summaries, until + 1, key=lambda summary: summary.step)]
    if not summaries:
        return []
    per_value = trend_steps(summaries[-1].step - summaries[0].step + 1, columns)
    newest = summaries[-1].step // per_value
    first = max(newest - columns + 1, summaries[0].step // per_value)
    values: list[float | None] = [None] * (newest - first + 1)
    for summary in reversed(summaries):
        at = summary.step // per_value - first
        if at < 0:
            break
        if axis in summary.comm:
            values[at] = max(values[at] or 0.0, summary.comm[axis].exposed_ms)
    return values


def trend_steps(steps: int, columns: int) -> int:
    """Number of steps per value of a trend: a power of two, so that this number changes rarely."""
    wanted = -(-min(steps, TREND) // max(1, columns))
    return 1 << max(0, wanted - 1).bit_length()
