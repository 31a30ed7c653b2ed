"""Ranks on two machines, in a training loop that calls `agents.join`, connect to one hub."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from agents.loop import start_hub
from agents.protocol.base import RunError
from agents.rundir import hub_supervisor
from agents.rundir.local_machine import this_host
from agents.transport.curve_keys import KeyStore
from agents.transport.reach import Reach
from agents.transport.roles import Role


class Machines:
    """Two ranks in two threads, each on its own machine, and the `agree` function that they share. Both machines have
    the same host name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = False  # whether the second machine is a container that sees the files of the first
        self._here = threading.local()
        self._said: dict[int, bytes] = {}
        self._both = threading.Barrier(2)

    def file_system(self) -> str:
        return f"machine-{getattr(self._here, 'rank', 'x')}"

    def answers(self, path: Path) -> bool:
        return self.shared or self._here.rank == 0

    def agree(self, mine: bytes) -> Sequence[bytes]:
        self._said[self._here.rank] = mine
        self._both.wait(30)
        said = [self._said[rank] for rank in range(2)]
        self._both.wait(30)
        return said

    def join(self, stack: ExitStack) -> list[Reach | Exception | None]:
        found: dict[int, Reach | Exception | None] = {}

        def rank(number: int) -> None:
            self._here.rank = number
            try:
                found[number] = start_hub.endpoint_for(stack, "auto", "r", self.folder, number, 2, self.agree)
            except (ValueError, OSError) as error:
                found[number] = error

        threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[0], found[1]]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    made = Machines(tmp_path / "run")
    monkeypatch.setenv("COCKPIT_KEYS", str(tmp_path / "keys"))
    monkeypatch.setattr(start_hub, "this_file_system", made.file_system)
    monkeypatch.setattr(start_hub, "ANSWERS_S", 0.0)
    monkeypatch.setattr(start_hub, "socket_answers", made.answers)
    monkeypatch.setattr(hub_supervisor, "own_address", lambda _: "127.0.0.1")
    return made


def test_ranks_of_another_machine_connect_over_tcp_with_a_key(machines: Machines, tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    with ExitStack() as stack:
        first, second = machines.join(stack)
        assert isinstance(first, Reach) and first.endpoint.startswith("ipc://") and first.key is None
        assert isinstance(second, Reach) and second.endpoint.startswith("tcp://127.0.0.1:")
        assert second.key is not None and second.key.name == "cluster"


def test_a_container_that_reaches_the_socket_of_the_hub_uses_it(machines: Machines) -> None:
    machines.shared = True
    with ExitStack() as stack:
        first, second = machines.join(stack)
        assert isinstance(first, Reach) and second == first and first.endpoint.startswith("ipc://")


def test_without_a_key_ranks_of_another_machine_run_without_a_hub(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        first, second = machines.join(stack)
        assert isinstance(first, Reach) and second is None
    assert (
        f"the hub runs on {this_host()}, and this rank cannot reach it: this hub requires a key"
        in caplog.text
    )


def test_a_hub_that_cannot_start_is_reported_to_all_ranks(machines: Machines, tmp_path: Path) -> None:
    """Without the report, the other ranks would wait for rank 0 forever."""
    (tmp_path / "file").touch()
    machines.folder = tmp_path / "file" / "run"
    with ExitStack() as stack:
        first, second = machines.join(stack)
    assert isinstance(first, RunError) and second is None
