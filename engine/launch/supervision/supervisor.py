"""Supervises forked ranks from their parent: detects failures and hangs, finds the root cause, ends the ranks.

This module runs no torch code.
"""

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
from engine.launch.supervision.failure import DONE, FailureReport, Outcome, root_cause
from engine.launch.supervision.signals import SAVE_SIGNAL_TO_RANK, STACKS_SIGNAL, Signals
from engine.rendezvous import LastOperations

COLLECT_S = 0.5  # after a failure: how long to wait for the reports of other failing ranks
TERM_S = 2.0  # after a failure: time between SIGTERM and SIGKILL
STACKS_S = 0.2  # how long to wait for the Python stacks of a hanging rank
TICK_S = 0.5  # longest sleep of the parent


@dataclass
class RankProcess:
    """What the parent keeps about a rank that it forked: its process id, the channel to it, and how it ended."""

    rank: int
    pid: int
    channel: socket.socket  # non-blocking; the other end is the rank's `ParentConnection.channel`
    stacks: IO[bytes]
    outcome: Outcome
    received: bytearray = field(default_factory=bytearray)
    released: bool = False

    @property
    def alive(self) -> bool:
        return self.outcome.status is None

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the rank. The signal cannot reach another process, because a rank keeps its process id until
        it is reaped."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """Send SIGTERM, and SIGCONT because a suspended rank does not handle SIGTERM."""
        self.kill(signal.SIGTERM)
        self.kill(signal.SIGCONT)

    def release(self) -> None:
        """Allow rank 0 to exit. Rank 0 waits for this permission, because it serves the store that all ranks share."""
        if not self.released:
            self.released = True
            with suppress(OSError):
                self.channel.send(b".")

    def read_messages(self) -> None:
        """Read the messages that the rank has sent, without waiting."""
        with suppress(OSError):
            while chunk := self.channel.recv(1 << 16):
                self.received += chunk
        while b"\n" in self.received:
            message, _, rest = self.received.partition(b"\n")
            self.received = bytearray(rest)
            if message == DONE.strip():
                self.outcome.done = True
            else:
                # A truncated report cannot be decoded; the exit status is used instead.
                with suppress(msgspec.DecodeError):
                    self.outcome.report = msgspec.json.decode(bytes(message), type=FailureReport)

    def reap(self) -> None:
        """Check whether the rank has ended; if so, reap it and read its last messages."""
        if self.alive:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.outcome.seen = time.time()
                self.read_messages()
                self.outcome.status = os.waitstatus_to_exitcode(status)

    def kill_and_close(self) -> None:
        """Kill the rank, wait until it has ended, and close the file descriptors shared with it."""
        self.kill(signal.SIGKILL)
        if self.alive:
            os.waitpid(self.pid, 0)
            self.outcome.status = -signal.SIGKILL
        self.channel.close()
        self.stacks.close()

    def read_stacks(self) -> str:
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), size, 0).decode(errors="replace")


@dataclass(frozen=True)
class Timeouts:
    """Time-outs after one rank is done, or after a request to stop: if ranks report no progress for this many seconds,
    the supervisor kills those that still run."""

    # After one rank is done: maximum time in which the other ranks report no progress.
    straggler_s: float = 30.0
    stuck_s: float = 300.0  # after a stop request: maximum time in which no rank ends or reports progress


class Supervisor:
    """Supervises forked ranks until all have ended."""

    def __init__(
        self,
        ranks: list[RankProcess],
        last_operations: LastOperations,
        signals: Signals,
        hub: HubSupervisor | None,
        timeouts: Timeouts,
    ):
        self._ranks = ranks
        self._last_operations = last_operations
        self._signals = signals
        self._hub = hub
        self._timeouts = timeouts
        self._selector = selectors.DefaultSelector()
        self._selector.register(signals.woken, selectors.EVENT_READ)
        for rank in ranks:
            self._selector.register(rank.channel, selectors.EVENT_READ, rank)

    @property
    def _living(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.alive]

    @property
    def _working(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.alive and not rank.outcome.done]

    @property
    def outcomes(self) -> list[Outcome]:
        """The outcome of each rank, ordered by rank; complete after `watch`."""
        return [rank.outcome for rank in self._ranks]

    def watch(self) -> Outcome | None:
        """Wait until all ranks have ended. Returns the root cause if the run failed, else None."""
        root = None
        try:
            self._wait_for_end_or_failure()
            if any(outcome.failed for outcome in self.outcomes):
                self._collect()
                # Find the cause before ending the other ranks: a rank that is ended may report a failure too.
                root = root_cause(self.outcomes)
            self._end_other_ranks()
        finally:
            self._kill_remaining()
            self._selector.close()
        return None if self._signals.interrupts > 1 else root

    def _wait_for_end_or_failure(self) -> None:
        stop_sent = False
        # `progress` holds the last operation of each rank and the number of ranks that are done; `since` is
        # the time of its last change.
        progress, since = (b"", 0), 0.0
        while self._working and not any(outcome.failed for outcome in self.outcomes):
            self._poll(TICK_S)
            now = time.monotonic()
            if self._signals.interrupts > 1:
                return
            if self._signals.stop and not stop_sent:
                stop_sent, since = True, now
                for rank in self._living:
                    rank.stop()
            ended = sum(outcome.done for outcome in self.outcomes)
            latest = self._last_operations.all_slots(), ended
            # A rank that waits for a checkpoint reports an operation every few seconds.
            if latest != progress:
                progress, since = latest, now
            elif ended and now - since > self._timeouts.straggler_s:
                self._kill_overdue(
                    f"reported no progress for {self._timeouts.straggler_s:g} s after other ranks had ended"
                )
            elif stop_sent and now - since > self._timeouts.stuck_s:
                self._kill_overdue(
                    f"did not stop after the stop request (no progress on any rank for {self._timeouts.stuck_s:g} s)"
                )

    def _poll(self, seconds: float) -> None:
        """Wait at most `seconds` for a message from a rank or a signal, and handle it."""
        for key, _ in self._selector.select(self._sleep(seconds)):
            if key.data is None:
                self._signals.drain()
            elif not self._read_messages(key.data):
                self._selector.unregister(key.fileobj)
        for rank in self._ranks:
            rank.reap()
            rank.outcome.where = self._last_operations.read(rank.rank)
        # A rank that has recorded an operation has installed its signal handlers.
        if self._signals.saves and self._ranks[0].outcome.where:
            self._signals.saves = 0
            self._ranks[0].kill(SAVE_SIGNAL_TO_RANK)
        if self._hub:
            self._hub.tick()

    def _sleep(self, seconds: float) -> float:
        restart = self._hub.seconds_to_restart() if self._hub else None
        return max(0.0, min(seconds, TICK_S, seconds if restart is None else restart))

    def _read_messages(self, rank: RankProcess) -> bool:
        rank.read_messages()
        try:
            return bool(rank.channel.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _poll_while_any(self, seconds: float, ranks: Callable[[], Iterable[RankProcess]]) -> None:
        """Handle events as long as `ranks` returns at least one rank, but stop after a second Ctrl-C or after `seconds`
        seconds."""
        end = time.monotonic() + seconds
        while any(True for _ in ranks()) and self._signals.interrupts <= 1:
            remaining = end - time.monotonic()
            if remaining <= 0:
                return
            self._poll(remaining)

    def _collect(self) -> None:
        """Wait for the reports of other ranks that fail at the same time."""
        self._poll_while_any(COLLECT_S, lambda: [rank for rank in self._working if not rank.outcome.report])

    def _kill_overdue(self, why: str) -> None:
        late = self._working
        for rank in late:
            rank.kill(STACKS_SIGNAL)
            rank.kill(signal.SIGCONT)
        self._poll_while_any(STACKS_S, lambda: self._working)
        for rank in late:
            if rank.alive:
                rank.outcome.overdue = why
                rank.outcome.seen = time.time()
                rank.kill(signal.SIGKILL)

    def _end_other_ranks(self) -> None:
        """Send SIGTERM to the ranks that are still running after a failure, allow rank 0 to exit although other ranks
        may still use its store, and wait up to `TERM_S` seconds."""
        if self._working:
            for rank in self._living:
                rank.outcome.ended_by_us = True
                rank.stop()
        for rank in self._living:
            rank.release()
        self._poll_while_any(TERM_S, lambda: self._living)

    def _kill_remaining(self) -> None:
        for rank in self._living:
            rank.outcome.ended_by_us = True
        for rank in self._ranks:
            rank.outcome.where = self._last_operations.read(rank.rank)
            rank.outcome.stacks = rank.read_stacks()
            rank.kill_and_close()
