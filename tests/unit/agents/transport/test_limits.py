"""A process that is close to its limits gets an error in place of a connection; libzmq alone would abort it."""

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.rank.agent import Agent
from agents.transport.limits import NoRoomError
from agents.transport.reconnecting import ReconnectingSocket

CONNECTED, REFUSED = 10, 11


def outcome(limit: Callable[[], None], endpoint: str, agent: bool = False) -> int:
    """How a forked process ends that connects under a limit: `CONNECTED`, `REFUSED` or the negative signal number."""
    if (child := os.fork()) == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            limit()
            if agent:
                Agent(endpoint, lambda: (0, "", 0.0))
            else:
                ReconnectingSocket(endpoint, None, immediate=True, high_water=8, reconnect_max_ms=200)
            os._exit(CONNECTED)
        except NoRoomError:
            os._exit(REFUSED)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def free_descriptors(count: int) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        opened = []
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for descriptor in opened[:count]:
                os.close(descriptor)

    return limit


def free_memory(megabytes: int) -> Callable[[], None]:
    def limit() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 20),) * 2)

    return limit


def test_without_free_descriptors_there_is_an_error(tmp_path: Path) -> None:
    ends = [outcome(free_descriptors(count), f"ipc://{tmp_path}/hub") for count in range(14)]
    assert set(ends) == {CONNECTED, REFUSED} and ends == sorted(ends, reverse=True)
    assert (
        outcome(free_descriptors(3), f"ipc://{tmp_path}/hub", agent=True) == CONNECTED
    )  # trains without a hub


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the size of this process")
def test_without_memory_for_threads_there_is_an_error(tmp_path: Path) -> None:
    ends = [outcome(free_memory(megabytes), f"ipc://{tmp_path}/hub") for megabytes in range(1, 40, 3)]
    assert -signal.SIGABRT not in ends
