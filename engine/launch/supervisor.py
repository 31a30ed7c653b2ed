"""The parent of forked ranks: watches them, ends them, and finds the cause of a failure. Runs no torch code."""

import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import msgspec

from agents.rundir.hub_supervisor import HubSupervisor
from engine.launch.failure import FailureReport, Outcome, root_cause
from engine.launch.forked_rank import DONE, STACKS_SIGNAL
from engine.launch.signals import Signals
from engine.rendezvous import LastOperations

COLLECT_S = 0.5  # wait for the reports of other failing ranks
TERM_S = 2.0  # between SIGTERM and SIGKILL for ranks whose run has failed
STACKS_S = 0.2  # wait for the Python stacks of a hanging rank
TICK_S = 0.5  # longest sleep of the parent


@dataclass
class RankProcess:
    """A forked rank, as seen by its parent."""

    rank: int
    pid: int
    line: socket.socket  # not blocking; to the rank's `Tie.line`
    stacks: IO[bytes]
    outcome: Outcome
    heard: bytearray = field(default_factory=bytearray)
    released: bool = False

    @property
    def alive(self) -> bool:
        return self.outcome.status is None

    def kill(self, number: signal.Signals) -> None:
        """Send a signal. A rank that is not reaped keeps its process id, so no other process can get the signal."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Send SIGTERM, and SIGCONT because a suspended rank does not handle SIGTERM."""
        self.kill(signal.SIGTERM)
        self.kill(signal.SIGCONT)

    def release(self) -> None:
        """Let rank 0, which serves the store, exit."""
        if not self.released:
            self.released = True
            with suppress(OSError):
                self.line.send(b".")

    def listen(self) -> None:
        """Read the rank's messages."""
        with suppress(OSError):
            while chunk := self.line.recv(1 << 16):
                self.heard += chunk
        while b"\n" in self.heard:
            word, _, rest = self.heard.partition(b"\n")
            self.heard = bytearray(rest)
            if word == DONE.strip():
                self.outcome.done = True
            else:
                with suppress(msgspec.DecodeError):  # incomplete: the exit status of the rank is enough
                    self.outcome.report = msgspec.json.decode(bytes(word), type=FailureReport)

    def reap(self) -> None:
        """Check whether the rank has ended; if so, read its last messages. Leaves no zombie."""
        if self.alive:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.outcome.seen = time.time()
                self.listen()
                self.outcome.status = os.waitstatus_to_exitcode(status)

    def abandon(self) -> None:
        """Kill the rank, wait for its end, close the shared files."""
        self.kill(signal.SIGKILL)
        if self.alive:
            os.waitpid(self.pid, 0)
            self.outcome.status = -signal.SIGKILL
        self.line.close()
        self.stacks.close()

    def read_stacks(self) -> str:
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), size, 0).decode(errors="replace")


@dataclass(frozen=True)
class Patience:
    """Timeouts for ranks, in seconds."""

    straggler_s: float = 30.0  # after the first rank is done: for ranks that report no progress
    stuck_s: float = 300.0  # after a stop request: for ranks of which none ends or reports progress


class Supervisor:
    """Supervises forked ranks until all have ended."""

    def __init__(
        self,
        ranks: list[RankProcess],
        last_operations: LastOperations,
        signals: Signals,
        hub: HubSupervisor | None,
        patience: Patience,
    ):
        self._ranks = ranks
        self._last_operations = last_operations
        self._signals = signals
        self._hub = hub
        self._patience = patience
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.woken, selectors.EVENT_READ)
        for rank in ranks:
            self._selector.register(rank.line, selectors.EVENT_READ, rank)

    @property
    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.alive]

    @property
    def _working(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.alive and not rank.outcome.done]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each rank, in order of rank; complete after `watch`."""
        return [rank.outcome for rank in self._ranks]

    def watch(self) -> Outcome | None:
        """Wait until all ranks have ended. Returns the root cause if the run failed, else None."""
        root = None
        try:
            self._until_ended_or_failed()
            if any(outcome.failed for outcome in self.outcomes):
                self._collect()
                # Choose the cause before ending the other ranks, which may fail because of that.
                root = root_cause(self.outcomes)
            self._end_the_others()
        finally:
            self._end_at_once()
            self._selector.close()
        return None if self._signals.interrupts > 1 else root

    def _until_ended_or_failed(self) -> None:
        stop_sent = False
        progress, since = (b"", 0), 0.0  # operations of all ranks and number of ended ranks, and since when
        while self._working and not any(outcome.failed for outcome in self.outcomes):
            self._turn(TICK_S)
            now = time.monotonic()
            if self._signals.interrupts > 1:
                return
            if self._signals.stop and not stop_sent:
                stop_sent, since = True, now
                for rank in self._living:
                    rank.stop()
            ended = sum(outcome.done for outcome in self.outcomes)
            latest = self._last_operations.all_slots(), ended
            if latest != progress:  # a rank that waits for its checkpoint reports that every few seconds
                progress, since = latest, now
            elif ended and now - since > self._patience.straggler_s:
                self._lose_patience(
                    f"said nothing for {self._patience.straggler_s:g} s after others had ended"
                )
            elif stop_sent and now - since > self._patience.stuck_s:
                self._lose_patience(
                    f"did not stop when asked, no rank moved for {self._patience.stuck_s:g} s,"
                )

    def _turn(self, seconds: float) -> None:
        """Sleep until an event, at most `seconds`, and handle it."""
        for key, _ in self._selector.select(self._sleep(seconds)):
            if key.data is None:
                self._signals.drain()
            elif not self._listen(key.data):
                self._selector.unregister(key.fileobj)
        for rank in self._ranks:
            rank.reap()
            rank.outcome.where = self._last_operations.read(rank.rank)
        if self._hub:
            self._hub.tick()

    def _sleep(self, seconds: float) -> float:
        restart = self._hub.seconds_to_restart() if self._hub else None
        return max(0.0, min(seconds, TICK_S, seconds if restart is None else restart))

    def _listen(self, rank: RankProcess) -> bool:
        rank.listen()
        try:
            return bool(rank.line.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _for(self, seconds: float, ranks: Callable[[], Iterable[RankProcess]]) -> None:
        """Handle events for `seconds`, or until `ranks` is empty, or until a second Ctrl-C."""
        end = time.monotonic() + seconds
        while any(True for _ in ranks()) and self._signals.interrupts <= 1:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return
            self._turn(remaining)

    def _collect(self) -> None:
        """Wait for the reports of other ranks that fail from the same cause."""
        self._for(COLLECT_S, lambda: [rank for rank in self._working if not rank.outcome.report])

    def _lose_patience(self, why: str) -> None:
        late = self._working
        for rank in late:
            rank.kill(STACKS_SIGNAL)
            rank.kill(signal.SIGCONT)
        self._for(STACKS_S, lambda: self._working)
        for rank in late:
            if rank.alive:
                rank.outcome.overdue = why
                rank.outcome.seen = time.time()
                rank.kill(signal.SIGKILL)

    def _end_the_others(self) -> None:
        """After a failure: SIGTERM, then SIGKILL after `TERM_S`. After a normal end: let rank 0 exit."""
        if self._working:
            for rank in self._living:
                rank.outcome.ended_by_us = True
                rank.stop()
        for rank in self._living:
            rank.release()
        self._for(TERM_S, lambda: self._living)

    def _end_at_once(self) -> None:
        for rank in self._living:
            rank.outcome.ended_by_us = True
        for rank in self._ranks:
            rank.outcome.where = self._last_operations.read(rank.rank)
            rank.outcome.stacks = rank.read_stacks()
            rank.abandon()
