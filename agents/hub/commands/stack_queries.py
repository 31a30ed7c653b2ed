"""Collects the Python stacks of ranks for clients, and for the alert `stall`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from msgspec import structs

from agents.hub.telemetry.membership import Membership
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import (
    STACKS,
    STACKS_FACT,
    Event,
    Facts,
    RankStacks,
    StackQuery,
    StacksCollected,
    Unanswered,
    WireError,
    clip,
    codec,
)
from agents.protocol.stacks import MOST_RANKS, MOST_UNANSWERED
from agents.state.stack_groups import explanation
from agents.transport.frame_filling import chunks

COLLECT_S = 5.0  # a rank that has not answered after this time is reported as not answering
PERIOD_S = 3.0  # minimum interval between two collections; queries in between wait for the next one
KEPT_BYTES = 64 << 20  # maximum size of all answers to one collection
CLIENTS = 64  # maximum number of clients that wait at a time

Send = Callable[[bytes, bytes], object]


@dataclass
class _Collection:
    """One collection of Python stacks: the ranks that were asked for their stacks, and their answers."""

    id: str
    began_s: float
    asked: list[int]  # sorted
    queries: dict[bytes, StackQuery]  # by client
    for_stall: bool
    expected: set[int]  # asked ranks that can answer
    answers: dict[int, RankStacks] = field(default_factory=dict)
    too_large: set[int] = field(default_factory=set)
    kept_bytes: int = 0

    @property
    def missing(self) -> set[int]:
        """The ranks whose answers are still expected."""
        return self.expected - self.answers.keys() - self.too_large


class StackQueries:
    """Asks ranks for their stacks on behalf of clients and of stall alerts. One request to the ranks answers all
    queries that are waiting; queries that arrive before it is finished wait for the next request.

    Answers are not stored on disk: a client that gets no answer repeats its query.
    """

    def __init__(self, update_log: UpdateLog, membership: Membership, send: Send) -> None:
        self._update_log, self._membership, self._send = update_log, membership, send
        self._waiting: dict[bytes, StackQuery] = {}
        # The ranks named by a stall alert for which no collection has begun yet; None: there is no such alert.
        self._stalled: list[int] | None = None
        self._current: _Collection | None = None
        self._last: _Collection | None = None
        self._count = 0

    def ask(self, client: bytes, query: StackQuery) -> str | None:
        """Queue a client's query, or repeat the answer if the last collection answered the same query. Returns a
        refusal if too many clients wait."""
        if self._current and self._current.queries.get(client) == query:
            return None
        if self._last and self._last.queries.get(client) == query:
            self._answer(self._last, client, query)
            return None
        if client not in self._waiting and len(self._waiting) >= CLIENTS:
            return f"{CLIENTS} clients wait for stacks already; try again in a few seconds"
        self._waiting[client] = query
        return None

    def explain_stall(self, ranks: Sequence[int]) -> None:
        """Collect the ranks' Python stacks, and publish an event that explains why the run has stalled. At most
        `MOST_RANKS` ranks are asked, first those in the alert (`ranks`)."""
        self._stalled = list(ranks)

    def take(self, stacks: RankStacks) -> None:
        """Keep the stacks that a rank has sent, if the hub is now collecting them; late answers to earlier requests are
        ignored."""
        current = self._current
        if current is None or stacks.id != current.id or stacks.rank not in current.missing:
            return
        try:
            current.kept_bytes += len(codec.pack(stacks))
        except WireError:
            current.too_large.add(stacks.rank)
            return
        if current.kept_bytes > KEPT_BYTES:
            current.too_large.add(stacks.rank)
        else:
            current.answers[stacks.rank] = stacks

    def turn(self, now: float) -> None:
        """Finish the current collection once all expected ranks have answered or `COLLECT_S` has passed: answer the
        clients and, after a stall, publish the explanation. Start the next collection if clients or a stall need one.
        `now`: monotonic time in seconds."""
        current = self._current
        if current and (not current.missing or now - current.began_s >= COLLECT_S):
            self._current, self._last = None, current
            for client, query in current.queries.items():
                self._answer(current, client, query)
            if current.for_stall:
                self._publish_explanation(current)
        wanted = bool(self._waiting) or self._stalled is not None
        if wanted and self._current is None and (self._last is None or now - self._last.began_s >= PERIOD_S):
            self._begin(now)

    def _begin(self, now: float) -> None:
        queries, self._waiting = self._waiting, {}
        first, self._stalled = self._stalled, None
        everybody = range(self._membership.world)
        named = set(first or ()).union(*(query.ranks for query in queries.values())).intersection(everybody)
        if first is not None or not all(query.ranks for query in queries.values()):
            named.update(
                islice((rank for rank in everybody if rank not in named), max(0, MOST_RANKS - len(named)))
            )
        ranks = sorted(named)[:MOST_RANKS]
        able = self._membership.with_capability(STACKS)
        self._count += 1
        collection = self._current = _Collection(
            f"stacks-{self._count}", now, ranks, queries, first is not None, able.keys() & set(ranks)
        )
        by_connection: dict[bytes, list[int]] = {}
        for rank in sorted(collection.expected):
            by_connection.setdefault(able[rank], []).append(rank)
        threads = any(query.threads for query in queries.values())
        for connection, those in by_connection.items():
            self._send(connection, codec.encode([StackQuery(collection.id, those, threads)]))

    def _answer(self, collection: _Collection, client: bytes, query: StackQuery) -> None:
        answers, end = self._part(collection, query)
        frames = chunks(codec.pack(message) for message in (*answers, end))
        for frame in frames:
            self._send(client, codec.frame(frame))

    def _part(self, collection: _Collection, query: StackQuery) -> tuple[list[RankStacks], StacksCollected]:
        """The stacks in `collection` that a client's query asks for, and the message that is sent after them."""
        world = self._membership.world
        wanted = set(query.ranks) if query.ranks else set(range(world))
        ranks = [rank for rank in collection.asked if rank in wanted]
        missing = [rank for rank in ranks if rank not in collection.answers]
        answers = [
            _for_client(collection.answers[rank], query) for rank in ranks if rank in collection.answers
        ]
        unanswered = [
            Unanswered(rank, self._why(rank, collection)[:512]) for rank in missing[:MOST_UNANSWERED]
        ]
        more = len(missing) - len(unanswered)
        not_asked = len(wanted.intersection(range(world))) - len(ranks)
        return answers, StacksCollected(query.id, world, len(answers), unanswered, more, not_asked)

    def _why(self, rank: int, collection: _Collection) -> str:
        hello = self._update_log.state.hellos.get(rank)
        if hello is None:
            return "it has not joined the run"
        if hello.simulated:
            return "it is simulated and has no stack"
        if STACKS not in hello.capabilities:
            return "its agent is of an older release, which sends no stacks"
        if rank in collection.too_large:
            return f"the hub keeps at most {KEPT_BYTES >> 20} MiB of stacks"
        return self._membership.process_text(rank) or "it has left the run"

    def _publish_explanation(self, collection: _Collection) -> None:
        answers, end = self._part(collection, StackQuery("stall"))
        found = explanation(answers, end)
        facts: Facts = {STACKS_FACT: len(answers), "odd": len(found.odd)}
        if found.odd:
            facts["rank"] = found.odd[0]
        self._update_log.publish(Event(time.time(), "warning", "hub", clip(found.sentence), facts))


def _for_client(stacks: RankStacks, query: StackQuery) -> RankStacks:
    """A rank's stacks as the answer to a client's query: with the query's id, and only the training thread unless the
    query asks for all threads.
    """
    threads = stacks.threads if query.threads else stacks.threads[:1]
    omitted = stacks.omitted_threads if query.threads else 0
    return structs.replace(stacks, id=query.id, threads=threads, omitted_threads=omitted)
