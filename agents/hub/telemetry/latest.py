"""What has changed in a run's state since a sequence number, for clients that skip intermediate updates.

A client that skips updates needs only the newest record of each kind and rank; these records are taken from the run's
state. Updates that are not records are kept in order. Nothing is stored for individual clients.
"""

from collections import deque
from collections.abc import Iterator

from msgspec import structs

from agents.protocol import JOB_RECORDS, Experts, Hello, Loads, Record, Unknown, Update, codec
from agents.protocol.codec import Skimmed
from agents.state.run_state import RunState

UPDATES_KEPT = 16_384  # maximum number of kept updates that are not records
BYTES_KEPT = 4 << 20  # maximum size of these, packed; a client that missed more gets a snapshot
RANK_DETAIL = (Experts,)  # kinds not sent to clients that want no rank detail
MALFORMED_KEPT = 64  # maximum number of malformed records kept until they are reported


class Latest:
    """Keeps the sequence number of the newest record of each kind and rank, and the newest updates that are not
    records."""

    def __init__(self, state: RunState, updates: int = UPDATES_KEPT, updates_bytes: int = BYTES_KEPT) -> None:
        self.reaches = 0  # updates after this number are available
        self._state = state
        self._records = state.records()
        # By kind and rank: sequence number and packed record.
        self._undecoded: dict[type[Update], dict[int, tuple[int, bytes]]] = {
            kind: {} for kind in self._records
        }
        self._received_to = self._decoded_to = 0  # highest sequence number received; highest decoded
        self.malformed: deque[tuple[int, Unknown]] = deque(maxlen=MALFORMED_KEPT)  # (rank, record) pairs
        self._numbers: dict[type[Update], dict[int, int]] = {kind: {} for kind in self._records}
        self._latest: dict[type[Update], tuple[int, bytes]] = {}
        # Sequence number, packed update, packed update without rank detail. As objects, updates would take about four
        # times the memory.
        self._updates: deque[tuple[int, bytes, bytes]] = deque()
        self._limits = (updates, updates_bytes)
        self._bytes = 0  # bytes of the kept updates

    def add_records(self, seq: int, records: Skimmed) -> None:
        """Add records, numbered from `seq` on. Each record replaces the earlier record of the same rank and kind."""
        # A frame of a relay has several records of each rank, so look for the newest ones first: a dictionary of all
        # ranks of a large run does not fit into the processor's cache.
        kinds = set(records.kinds)
        for kind in kinds:
            if len(kinds) == 1:
                last = dict(zip(records.ranks, range(len(records)), strict=True))
            else:
                columns = enumerate(zip(records.kinds, records.ranks, strict=True))
                last = {rank: place for place, (one, rank) in columns if one is kind}
            packed = records.packed
            self._undecoded[kind].update({rank: (seq + place, packed[place]) for rank, place in last.items()})
        self._received_to = seq + len(records) - 1

    def read(self) -> None:
        """Decode the records received since the last call into the state; add malformed records to `malformed`."""
        for kind, undecoded in self._undecoded.items():
            newest = self._records[kind]
            for rank, (seq, packed) in undecoded.items():
                if seq > self._decoded_to:
                    record = codec.read(kind, packed)
                    if isinstance(record, Unknown):
                        self.malformed.append((rank, record))
                    else:
                        newest[rank] = record
        self._decoded_to = self._received_to

    def add(self, seq: int, update: Update, packed: bytes) -> None:
        """Apply any update."""
        kind = type(update)
        if isinstance(update, Record):
            self._undecoded[kind].pop(update.rank, None)
            self._records[kind][update.rank] = update
            self._numbers[kind][update.rank] = seq
            return
        restarts = self._state.restarts
        self._state.apply(update)
        if self._state.restarts != restarts:  # the state has no records of ranks any more
            for kind_of_record in self._records:
                self._undecoded[kind_of_record].clear()
                self._numbers[kind_of_record].clear()
            self._latest = {kind: one for kind, one in self._latest.items() if kind not in (Experts, Loads)}
        if kind in JOB_RECORDS:
            self._latest[kind] = (seq, packed)
            return
        thin = brief(update)
        self._updates.append((seq, packed, packed if thin is update else codec.pack(thin)))
        self._bytes += len(packed)
        while len(self._updates) > self._limits[0] or self._bytes > self._limits[1]:
            self.reaches, forgotten, _ = self._updates.popleft()
            self._bytes -= len(forgotten)

    def after(self, seq: int, ranks: bool = True) -> Iterator[bytes]:
        """Yields the updates after sequence number `seq`, packed; of the records, only the newest of each kind and
        rank. A record is packed only when it is yielded, so it has the value that is current then. Without `ranks`,
        per-rank records are left out.
        """
        updates = []
        for number, packed, thin in reversed(self._updates):
            if number <= seq:
                break
            updates.append(packed if ranks else thin)
        yield from reversed(updates)
        for kind, (number, packed) in list(self._latest.items()):
            if number > seq and (ranks or kind not in RANK_DETAIL):
                yield packed
        for kind, numbers in self._numbers.items() if ranks else ():
            newest, undecoded = self._records[kind], self._undecoded[kind]
            changed = [rank for rank, number in numbers.items() if number > seq and rank not in undecoded]
            changed += [rank for rank, (number, _) in undecoded.items() if number > seq]
            for rank in changed:
                yield undecoded[rank][1] if rank in undecoded else codec.pack(newest[rank])

    def all(self, ranks: bool = True) -> Iterator[Update]:
        """The whole state as updates, for a new client."""
        if ranks:
            self.read()
            yield from self._state.replay()
            return
        for update in self._state.replay():
            if type(update) not in self._records and type(update) not in RANK_DETAIL:
                yield brief(update)


def brief(update: Update) -> Update:
    """The update, shortened for a client that wants no details of single ranks: the facts and capabilities are removed
    from a hello message, unless the leader sent it. All other updates are returned unchanged. Most facts are equal on
    all ranks, so those of the leader are enough.
    """
    if isinstance(update, Hello) and not update.leader:
        return structs.replace(update, facts={}, capabilities=[])
    return update
