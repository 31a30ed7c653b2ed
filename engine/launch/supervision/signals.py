"""Signal handling in the parent of forked ranks: handlers record signals, and the parent's loop acts on them."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAVE_SIGNAL = signal.SIGUSR1  # requests a checkpoint: sent to `engine run`, or to a rank of torchrun or Slurm
SAVE_SIGNAL_TO_RANK = signal.SIGUSR2  # how `engine run` forwards it to the forked rank 0
STACKS_SIGNAL = signal.SIGUSR1  # on this signal a rank writes its Python stacks, even if it hangs in C code


class StopNow(BaseException):
    """A stop signal arrived before all ranks were started."""


class Signals:
    """Context manager that handles SIGTERM, SIGHUP, SIGINT, SIGUSR1 and SIGCHLD, and restores the previous handlers
    on exit."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None  # the first stop signal
        self.interrupts = 0  # how many times Ctrl-C was pressed
        self.saves = 0  # how often a checkpoint was requested
        self.woken, self._waker = socket.socketpair()  # readable after any signal
        self._raising = False
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.woken.setblocking(False)
        self._waker.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            former = signal.getsignal(number)
            if number == signal.SIGHUP and former == signal.SIG_IGN:
                continue  # started with nohup, so the run continues when its terminal closes
            self._former[number] = former
            signal.signal(number, self._stopped)
        self._former[SAVE_SIGNAL] = signal.signal(SAVE_SIGNAL, self._save)
        # The handler only wakes the parent.
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_wakeup)
        self.close()

    def close(self) -> None:
        """Close the wake-up sockets. A forked rank calls this instead of exiting the context manager."""
        self.woken.close()
        self._waker.close()

    def _stopped(self, number: int, _: FrameType | None) -> None:
        self.stop = self.stop or signal.Signals(number)
        self.interrupts += number == signal.SIGINT
        if self._raising:
            raise StopNow

    def _save(self, *_: object) -> None:
        self.saves += 1

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Context manager in which a stop signal raises `StopNow` immediately, even during an import."""
        self._raising = True
        try:
            if self.stop:
                raise StopNow
            yield
        finally:
            self._raising = False
        if self.stop:
            raise StopNow  # other code has caught the first StopNow

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Context manager that blocks stop signals, so that none arrives after a fork and before the parent has
        recorded the child."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def pending(self) -> bool:
        """Whether a blocked stop signal is pending."""
        return not signal.sigpending().isdisjoint(STOP_SIGNALS)

    def drain(self) -> None:
        """Read and discard all bytes in the wake-up socket."""
        with suppress(BlockingIOError):
            while self.woken.recv(4096):
                pass

    @property
    def exit_status(self) -> int:
        """Exit status of a run without failure: 130 after Ctrl-C, by convention; else 0."""
        return 130 if self.stop == signal.SIGINT else 0
