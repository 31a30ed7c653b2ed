"""Which connection is which rank, and which ranks have fallen silent."""

import math
from dataclasses import dataclass
from typing import Literal

from agents import codec, wire
from agents.runs import process_state, this_host
from agents.wire import Gone, Hello

LOST_AFTER_S = 5.0  # without a word; a rank's own thread sends a pulse each second
SUCCESSION_S = 2.0  # a connection silent for so long gives way to a new one that claims its rank
LARGEST_WORLD = 1 << 16
LARGEST_REVISION = 1 << 40  # far from where numbers end, so that there is always a next one

Process = Literal["unknown", "ended", "stopped", "alive"]


@dataclass
class _Rank:
    hello: Hello
    identity: bytes
    heard_s: float
    lost: bool = False
    process: Process = "unknown"  # when it was lost


class Roster:
    """The ranks of one run, each known by its last Hello. The first Hello fixes world and layout for all."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.world = 0
        self._layout = ""
        self._ranks: dict[int, _Rank] = {}
        self._by_identity: dict[bytes, _Rank] = {}

    @property
    def leader(self) -> Hello | None:
        """The rank that takes commands, as long as it is not lost."""
        found = next((known for known in self._ranks.values() if known.hello.leader), None)
        return found.hello if found and not found.lost else None

    def identity(self, rank: int) -> bytes:
        return self._ranks[rank].identity

    def able(self, capability: str) -> dict[int, bytes]:
        """Where each rank is heard that says it can do that, and is there."""
        return {
            rank: known.identity
            for rank, known in self._ranks.items()
            if not known.lost and capability in known.hello.capabilities
        }

    def hello(self, identity: bytes, hello: Hello, now: float) -> str | None:
        """Enter a rank; a sentence if it cannot be one of this run."""
        refusal = self._refusal(identity, hello, now)
        if refusal:
            return refusal
        self.world, self._layout = hello.world, hello.layout
        known = self._ranks.get(hello.rank)
        if known:
            self._by_identity.pop(known.identity, None)
        self._ranks[hello.rank] = self._by_identity[identity] = _Rank(hello, identity, now)
        return None

    def _refusal(self, identity: bytes, hello: Hello, now: float) -> str | None:
        me = f"rank {hello.rank}"
        if hello.version != wire.VERSION:
            return f"{me}: {codec.version_refusal(hello.version)}"
        if hello.run != self.run:
            return f"{me} belongs to run {hello.run}, and this hub serves run {self.run}"
        if not 0 < hello.world <= LARGEST_WORLD or hello.rank >= hello.world:
            legal = f"a world of 1 to {LARGEST_WORLD}, and a rank below it"
            return f"rank {hello.rank} of a world of {hello.world} cannot be; legal: {legal}"
        if not math.isfinite(hello.began_s) or not math.isfinite(hello.age_s or 0.0):
            return f"{me} began at {hello.began_s:g}, {hello.age_s} s ago, which is no time"
        if hello.revision > LARGEST_REVISION:
            return f"{me} claims knob revision {hello.revision}, which cannot be"
        if self._ranks and hello.world != self.world:
            return f"{me} counts {hello.world} ranks, and this run has {self.world}"
        if self._ranks and hello.layout != self._layout:
            differ = f"{me} has layout {hello.layout}, and this run has {self._layout}"
            return f"{differ}; give all ranks the same layout and data"
        mine = self._by_identity.get(identity)
        if mine and mine.hello.rank != hello.rank:
            return f"{me} said hello on the connection of rank {mine.hello.rank}"
        other = next(
            (known.hello for known in self._ranks.values() if known.hello.leader and not known.lost), None
        )
        if hello.leader and other and other.rank != hello.rank:
            return f"{me} wants to lead, and rank {other.rank} leads this run"
        known = self._ranks.get(hello.rank)
        if known and known.identity != identity and not known.lost and now - known.heard_s < SUCCESSION_S:
            same = (known.hello.host, known.hello.pid) == (hello.host, hello.pid)
            if not same:
                return f"{me} is connected already, as process {known.hello.pid} on {known.hello.host}"
        return None

    def heard(self, identity: bytes, now: float) -> tuple[Hello | None, bool]:
        """A message came: that connection's Hello (None: it said none), and whether it was lost till now."""
        known = self._by_identity.get(identity)
        if known is None:
            return None, False
        was_lost, known.lost, known.heard_s = known.lost, False, now
        return known.hello, was_lost

    def leave(self, identity: bytes) -> None:
        """A rank said goodbye; its connection has to say hello to be heard again."""
        known = self._by_identity.pop(identity)
        known.lost, known.process = True, "unknown"

    def newly_lost(self, now: float) -> list[Gone]:
        """The ranks that have just been silent for too long, and the lost whose process is not as it was then."""
        here = this_host()
        gone = []
        for rank, known in self._ranks.items():
            local = known.hello.host == here
            if known.lost:
                news = local and known.process in ("stopped", "alive") and _process(known) != known.process
            else:
                news = now - known.heard_s > LOST_AFTER_S
            if news:
                known.lost, known.process = True, _process(known) if local else "unknown"
                text = f"no word for {LOST_AFTER_S:g} s{_fate(known)}"
                gone.append(Gone(rank, clean=False, text=text, process=known.process))
        return gone


def _process(known: _Rank) -> Process:
    return process_state(known.hello.pid)


def _fate(known: _Rank) -> str:
    pid = known.hello.pid
    if known.process == "unknown":
        return f" from process {pid} on {known.hello.host}"
    return f": process {pid} {_FATES[known.process]}"


_FATES = {
    "ended": "has ended",
    "stopped": "is suspended (kill -CONT resumes it)",
    "alive": "is alive but silent",
}
