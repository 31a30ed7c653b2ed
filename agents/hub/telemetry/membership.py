"""Membership: which connection belongs to which rank, and which ranks are lost."""

import math
import time
from dataclasses import dataclass, field
from typing import Literal

from msgspec import structs

from agents import protocol
from agents.protocol import TEXT, Gone, Hello, Relay, codec
from agents.rundir.local_machine import Machine, process_state, this_machine

# A rank that sends nothing for this long is lost; the thread of each agent sends a pulse every second.
LOST_AFTER_S = 5.0
# After this long without a message on its connection, a rank may register on a new connection.
SUCCESSION_S = 2.0
LARGEST_WORLD = 1 << 16
# Maximum number of relay connections without ranks. When a job starts, all its relays connect before its ranks.
RELAYS_WITHOUT_RANKS = 8192
LARGEST_REVISION = 1 << 40  # far below the integer limit, so that the revision can always be increased

Process = Literal["unknown", "ended", "stopped", "alive"]


@dataclass
class Known:
    """A rank that has joined the run: its last Hello, its connection, and whether the rank is lost."""

    hello: Hello
    identity: bytes
    heard_s: float
    lost: bool = False
    process: Process = "unknown"  # state of the rank's process when the rank was lost

    def mark_heard(self, now: float) -> bool:
        """Record that a message arrived from the rank; returns whether the rank was marked as lost before."""
        was_lost, self.lost, self.heard_s = self.lost, False, now
        return was_lost


@dataclass
class Connection:
    """The ranks whose messages may arrive on one connection: a single rank, or all ranks that sent a hello through a
    relay."""

    relay: Relay | None = None
    ranks: dict[int, Known] = field(default_factory=dict)

    @property
    def only(self) -> Known | None:
        """The rank of a direct connection; None for the connection of a relay."""
        return None if self.relay else next(iter(self.ranks.values()), None)


class Membership:
    """The ranks of one run, each with its last Hello. The first Hello sets the world size and the layout for all ranks.
    After the launcher has restarted the ranks (`Hello.restarts`), the first new Hello sets the world size and the
    layout again. So does the first Hello from a new launcher, which counts restarts from 0, once all ranks of the
    former launcher have left or are lost."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.world = 0
        self._layout = ""
        self._simulated = False
        self._restarts = 0
        self._ranks: dict[int, Known] = {}
        self._leader: Known | None = None  # the last accepted leader
        self._connections: dict[bytes, Connection] = {}
        self._machines: dict[str, list[tuple[str, str]]] = {}  # host name -> the machines that have it

    @property
    def leader(self) -> Hello | None:
        """The hello of the leader, which receives the commands; None while the leader is lost."""
        return self._leader.hello if self._leader and not self._leader.lost else None

    @property
    def last_leader(self) -> int | None:
        """The rank number of the last leader, even if that rank is lost."""
        return self._leader.hello.rank if self._leader else None

    def identity(self, rank: int) -> bytes:
        return self._ranks[rank].identity

    def with_capability(self, capability: str) -> dict[int, bytes]:
        """The connected ranks whose hello lists `capability`, with the identities of their connections."""
        return {
            rank: known.identity
            for rank, known in self._ranks.items()
            if not known.lost and capability in known.hello.capabilities
        }

    def hello(self, identity: bytes, hello: Hello, now: float) -> str | None:
        """Register a rank; returns a refusal if the rank cannot belong to this run. `hello_of` then returns the hello
        as clients get it."""
        refusal = self._refusal(identity, hello, now)
        if refusal:
            return refusal
        if hello.restarts != self._restarts:
            self._forget_ranks()
        self._restarts = hello.restarts
        self.world, self._layout, self._simulated = hello.world, hello.layout, hello.simulated
        known = self._ranks.get(hello.rank)
        if known:
            self._remove_from_connection(known)
        hello = structs.replace(_by_our_clock(hello), host=self._host_name(hello))
        known = self._ranks[hello.rank] = Known(hello, identity, now)
        self._succeed(known)
        self._connections.setdefault(identity, Connection()).ranks[hello.rank] = known
        return None

    def hello_of(self, rank: int) -> Hello:
        """The hello of a registered rank, with its start time on this machine's clock, and with a host name that no
        other machine of the run has."""
        return self._ranks[rank].hello

    def _host_name(self, hello: Hello) -> str:
        if not hello.machine:
            return hello.host
        machines = self._machines.setdefault(hello.host, [])
        machine = Machine.parse(hello.machine).kernel
        if machine not in machines and len(machines) < LARGEST_WORLD:
            machines.append(machine)
        number = machines.index(machine) if machine in machines else 0
        return f"{hello.host[: TEXT - 16]}#{number + 1}" if number else hello.host

    def _forget_ranks(self) -> None:
        """After a restart of all ranks, forget the ranks known before it. If one of these ranks still sends records,
        the hub requests its hello and then refuses the rank.
        """
        self._ranks, self._leader = {}, None
        self._connections = {
            identity: Connection(connection.relay)
            for identity, connection in self._connections.items()
            if connection.relay
        }

    def _succeed(self, known: Known) -> None:
        """Keep a single leader: if another rank has taken over, a lost leader that returns does not lead again."""
        old = self._leader
        if known.hello.leader:
            if old and old.hello.rank != known.hello.rank:
                old.hello = structs.replace(old.hello, leader=False)
            self._leader = known
        elif old and old.hello.rank == known.hello.rank:
            self._leader = None

    def relay(self, identity: bytes, relay: Relay) -> str | None:
        """Register a relay, which may send for several ranks; returns a refusal if this relay cannot be registered."""
        me = f"the relay on {relay.host}"
        if relay.version != protocol.VERSION:
            return f"{me}: {codec.version_refusal(relay.version)}"
        if relay.run != self.run:
            return f"{me} belongs to run {relay.run}, but this hub serves run {self.run}"
        connection = self._connections.get(identity)
        if connection and not connection.relay:
            return f"{me} sent an introduction on the connection of a rank"
        if connection is None:
            relays = [one for one, it in self._connections.items() if it.relay and not it.ranks]
            if len(relays) >= RELAYS_WITHOUT_RANKS:
                del self._connections[relays[0]]
            connection = self._connections[identity] = Connection()
        connection.relay = relay
        return None

    def _remove_from_connection(self, known: Known) -> None:
        """Remove a rank from the connection through which it was registered."""
        connection = self._connections.get(known.identity)
        if connection and connection.ranks.get(known.hello.rank) is known:
            del connection.ranks[known.hello.rank]
            if not connection.ranks and not connection.relay:
                del self._connections[known.identity]

    def _refusal(self, identity: bytes, hello: Hello, now: float) -> str | None:
        me = f"rank {hello.rank}"
        if hello.version != protocol.VERSION:
            return f"{me}: {codec.version_refusal(hello.version)}"
        if hello.run != self.run:
            return f"{me} belongs to run {hello.run}, but this hub serves run {self.run}"
        if not 0 < hello.world <= LARGEST_WORLD or hello.rank >= hello.world:
            legal = f"a world of 1 to {LARGEST_WORLD} ranks, and a rank below the size of the world"
            return f"rank {hello.rank} of a world of {hello.world} is not legal; legal: {legal}"
        if not math.isfinite(hello.began_s) or not math.isfinite(hello.age_s or 0.0):
            ago = "" if hello.age_s is None else f", {hello.age_s:g} s ago"
            return f"{me} began at {hello.began_s:g}{ago}, which is not a valid time"
        if hello.revision > LARGEST_REVISION:
            return f"{me} reports knob revision {hello.revision}, which is not legal"
        if hello.restarts > self._restarts or self._from_new_launcher(hello):
            return None  # its launcher has started all ranks again, perhaps in another layout
        if hello.restarts < self._restarts:
            return f"{me} is from start {hello.restarts}, but the ranks are now in start {self._restarts}"
        if self._ranks and hello.world != self.world:
            return f"{me} has a world of {hello.world} ranks, but this run has {self.world}"
        if self._ranks and hello.layout != self._layout:
            differ = f"{me} has layout {hello.layout}, but this run has {self._layout}"
            return f"{differ}; give all ranks the same layout and data"
        if self._ranks and hello.simulated != self._simulated:
            kinds = ("is not simulated, but this run is", "is simulated, but this run is not")
            return f"{me} {kinds[hello.simulated]}"
        connection = self._connections.get(identity)
        own_rank = connection.only if connection else None
        if own_rank and own_rank.hello.rank != hello.rank:
            return f"{me} sent a hello on the connection of rank {own_rank.hello.rank}"
        other = self.leader
        if hello.leader and other and other.rank != hello.rank:
            return f"{me} claims to be the leader, but rank {other.rank} leads this run"
        known = self._ranks.get(hello.rank)
        heard = known and known.identity != identity and not known.lost and now - known.heard_s < SUCCESSION_S
        if known and heard and known.hello.process != hello.process:
            return f"{me} is already connected, as process {known.hello.pid} on {known.hello.host}"
        return None

    def _from_new_launcher(self, hello: Hello) -> bool:
        """Whether a rank with fewer restarts belongs to a later launcher, which counts from 0 again: all known ranks
        have left or are lost, and this rank began after them."""
        known = self._ranks.values()
        return hello.restarts < self._restarts and all(
            one.lost and one.hello.began_s < hello.began_s for one in known
        )

    def connection(self, identity: bytes) -> Connection | None:
        """The ranks whose messages may arrive on a connection; None if no hello has arrived on it."""
        return self._connections.get(identity)

    def leave(self, rank: int) -> None:
        """Handle the message with which a rank leaves the run. If the rank comes back, it must first send a hello."""
        known = self._ranks[rank]
        self._remove_from_connection(known)
        known.lost, known.process = True, "unknown"

    def all_left(self) -> bool:
        """Whether every rank of the world has joined, and has left or ended. A rank that is lost counts as ended."""
        here = this_machine()
        return 0 < self.world <= len(self._ranks) and all(
            known.lost or (known.hello.machine == here and _process(known) == "ended")
            for known in self._ranks.values()
        )

    def process_text(self, rank: int) -> str:
        """The process state of a rank that does not answer, as far as the hub can check it; "" for a rank that never
        joined.
        """
        known = self._ranks.get(rank)
        if known is None:
            return ""
        pid = known.hello.pid
        if known.hello.machine != this_machine():
            return f"the hub cannot check process {pid} on {known.hello.host}"
        return f"process {pid} {_PROCESS_TEXT[_process(known)]}"

    def newly_lost(self, now: float) -> list[Gone]:
        """Ranks that count as lost from now on because they have been silent for too long, and ranks already lost whose
        process state has changed since the last call.
        """
        here = this_machine()
        gone = []
        for rank, known in self._ranks.items():
            if not known.lost and now - known.heard_s <= LOST_AFTER_S:
                continue  # first, because this runs for each rank twice a second
            local = known.hello.machine == here
            if known.lost:
                news = local and known.process in ("stopped", "alive") and _process(known) != known.process
            else:
                news = True
            if news:
                known.lost, known.process = True, _process(known) if local else "unknown"
                # State the time of day, not the age, because the text may be read much later.
                heard = time.localtime(time.time() - (now - known.heard_s))
                text = f"no message since {time.strftime('%H:%M:%S', heard)}{_process_text(known)}"
                gone.append(Gone(rank, clean=False, text=text, process=known.process))
        return gone


def _by_our_clock(hello: Hello) -> Hello:
    """The hello, with its start time converted to this machine's clock, because the timestamps of commands use that
    clock."""
    return hello if hello.age_s is None else structs.replace(hello, began_s=time.time() - hello.age_s)


def _process(known: Known) -> Literal["ended", "stopped", "alive"]:
    return process_state(known.hello.pid, known.hello.process_start)


def _process_text(known: Known) -> str:
    pid = known.hello.pid
    if known.process == "unknown":
        return f" from process {pid} on {known.hello.host}; the hub cannot check whether it is alive"
    return f": process {pid} {_PROCESS_TEXT[known.process]}"


_PROCESS_TEXT = {
    "ended": "has ended",
    "stopped": "is suspended (kill -CONT resumes it)",
    "alive": "is alive but silent (a call into C that holds Python's lock stops its pulse too)",
}
