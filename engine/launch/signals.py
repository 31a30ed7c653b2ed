"""The signals of a run's parent: noted by handlers, acted upon by its loop."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopNow(BaseException):
    """A stop signal came while there was no rank to wait for."""


class Signals:
    """SIGTERM, SIGHUP, SIGINT and SIGCHLD while a run lasts; leaving brings the former handlers back."""

    def __init__(self) -> None:
        self.stop: signal.Signals | None = None  # the first stop signal
        self.interrupts = 0  # how often Ctrl-C came
        self.woken, self._waker = socket.socketpair()  # readable after any signal
        self._eager = False
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.woken.setblocking(False)
        self._waker.setblocking(False)
        self._former_wakeup = signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            former = signal.getsignal(number)
            if number == signal.SIGHUP and former == signal.SIG_IGN:
                continue  # under nohup the run outlives its terminal
            self._former[number] = former
            signal.signal(number, self._stopped)
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)  # for the wake-up
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_wakeup)
        self.close()

    def close(self) -> None:
        """Close the wake-up pair; in a forked rank, that is all there is to do."""
        self.woken.close()
        self._waker.close()

    def _stopped(self, number: int, _: FrameType | None) -> None:
        self.stop = self.stop or signal.Signals(number)
        self.interrupts += number == signal.SIGINT
        if self._eager:
            raise StopNow

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Within, a stop signal raises `StopNow` at once, be it in the middle of an import."""
        self._eager = True
        try:
            if self.stop:
                raise StopNow
            yield
        finally:
            self._eager = False
        if self.stop:
            raise StopNow  # something has swallowed the first

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, stop signals wait: none may fall between a fork and the note of its child."""
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def waiting(self) -> bool:
        """Whether a stop signal is being held."""
        return not signal.sigpending().isdisjoint(STOP_SIGNALS)

    def drain(self) -> None:
        with suppress(BlockingIOError):
            while self.woken.recv(4096):
                pass

    @property
    def exit_status(self) -> int:
        """Of a run that ended as asked: 130 after Ctrl-C, by custom; 0 after any other stop, or none."""
        return 130 if self.stop == signal.SIGINT else 0
