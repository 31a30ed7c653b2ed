"""What has changed since a number, newest only: for those who want less than everything.

Of what each rank says again and again (its records) only the newest counts, and is found in the run's state. All else
is news, kept in order. Nothing is kept for any one client.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from msgspec import structs

from agents.protocol import Experts, Hello, Loads, Unknown, Update, codec
from agents.protocol.codec import Skimmed
from agents.state.run_state import Record, RunState

NEWS = 16_384  # updates kept, other than records
NEWS_BYTES = 4 << 20  # of them, packed: who has missed more is better served with a snapshot
LATEST = (Loads, Experts)  # of the job, and only the newest counts
LARGE = (Experts,)  # not for those who want no ranks
MALFORMED = 64  # remembered until somebody asks


class Latest:
    """Numbers of the newest record by kind and rank, and the newest news."""

    def __init__(self, state: RunState, news: int = NEWS, news_bytes: int = NEWS_BYTES) -> None:
        self.reaches = 0  # back to this number
        self._state = state
        self._records = state.records()
        self._came: dict[type[Update], dict[int, tuple[int, Skimmed]]] = {kind: {} for kind in self._records}
        self._came_to = self._read_to = 0  # the last number given to one of those, and the last that was read
        self.malformed: deque[tuple[int, Unknown]] = deque(maxlen=MALFORMED)  # records, and whose they are
        self._numbers: dict[type[Update], dict[int, int]] = {kind: {} for kind in self._records}
        self._latest: dict[type[Update], tuple[int, bytes]] = {}
        # Number, packed, and packed for those who want no ranks: as objects, updates take some four times the memory.
        self._news: deque[tuple[int, bytes, bytes]] = deque()
        self._limits = (news, news_bytes)
        self._bytes = 0  # of the news

    def add_records(self, seq: int, records: Sequence[Skimmed]) -> None:
        """Keep records, of which the first has number `seq`, in place of older ones of their rank."""
        came = self._came
        for record in records:
            came[record.kind][record.rank] = (seq, record)
            seq += 1
        self._came_to = seq - 1

    def read(self) -> None:
        """Put the records that nobody has looked at yet into the state, except for malformed ones."""
        for kind, came in self._came.items():
            newest = self._records[kind]
            for rank, (seq, skimmed) in came.items():
                if seq > self._read_to:
                    record = codec.read(skimmed)
                    if isinstance(record, Unknown):
                        self.malformed.append((rank, record))
                    else:
                        newest[rank] = record
        self._read_to = self._came_to

    def add(self, seq: int, update: Update, packed: bytes) -> None:
        """Apply any update."""
        kind = type(update)
        if isinstance(update, Record):
            self._came[kind].pop(update.rank, None)
            self._records[kind][update.rank] = update
            self._numbers[kind][update.rank] = seq
            return
        self._state.apply(update)
        if kind in LATEST:
            self._latest[kind] = (seq, packed)
            return
        thin = brief(update)
        self._news.append((seq, packed, packed if thin is update else codec.pack(thin)))
        self._bytes += len(packed)
        while len(self._news) > self._limits[0] or self._bytes > self._limits[1]:
            self.reaches, forgotten, _ = self._news.popleft()
            self._bytes -= len(forgotten)

    def after(self, seq: int, ranks: bool = True) -> Iterator[bytes]:
        """What has changed after `seq`, packed, each as it is when it is taken here; without `ranks`, no records."""
        news = []
        for number, packed, thin in reversed(self._news):
            if number <= seq:
                break
            news.append(packed if ranks else thin)
        yield from reversed(news)
        for kind, (number, packed) in list(self._latest.items()):
            if number > seq and (ranks or kind not in LARGE):
                yield packed
        for kind, numbers in self._numbers.items() if ranks else ():
            newest, came = self._records[kind], self._came[kind]
            changed = [rank for rank, number in numbers.items() if number > seq and rank not in came]
            changed += [rank for rank, (number, _) in came.items() if number > seq]
            for rank in changed:
                yield came[rank][1].packed if rank in came else codec.pack(newest[rank])

    def all(self, ranks: bool = True) -> Iterator[Update]:
        """The state, for one who knows nothing."""
        if ranks:
            self.read()
            yield from self._state.replay()
            return
        for update in self._state.replay():
            if type(update) not in self._records and type(update) not in LARGE:
                yield brief(update)


def brief(update: Update) -> Update:
    """As one wants it who looks at the job and not at ranks: facts are the same for all, and the leader tells them."""
    if isinstance(update, Hello) and not update.leader:
        return structs.replace(update, facts={}, capabilities=[])
    return update
