"""Ranks on two machines, in a training loop that calls `agents.join`, connect to one hub."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from agents.loop import start_hub
from agents.rundir import hub_supervisor
from agents.transport.curve_keys import KeyStore
from agents.transport.reach import Reach
from agents.transport.roles import Role


class Machines:
    """Two ranks in two threads, each with its own host name, and the `agree` function that they share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._here = threading.local()
        self._said: dict[int, bytes] = {}
        self._both = threading.Barrier(2)

    def host(self) -> str:
        return f"machine-{getattr(self._here, 'rank', 'x')}"

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
    monkeypatch.setattr(start_hub, "this_host", made.host)
    monkeypatch.setattr(hub_supervisor, "own_address", lambda _: "127.0.0.1")
    return made


def test_ranks_of_another_machine_connect_over_tcp_with_a_key(machines: Machines, tmp_path: Path) -> None:
    KeyStore(tmp_path / "keys").make("cluster", Role.RANK)
    with ExitStack() as stack:
        first, second = machines.join(stack)
        assert isinstance(first, Reach) and first.endpoint.startswith("ipc://") and first.key is None
        assert isinstance(second, Reach) and second.endpoint.startswith("tcp://127.0.0.1:")
        assert second.key is not None and second.key.name == "cluster"


def test_without_a_key_ranks_of_another_machine_run_without_a_hub(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        first, second = machines.join(stack)
        assert isinstance(first, Reach) and second is None
    assert "the hub runs on machine-0, and this rank cannot reach it: this hub requires a key" in caplog.text


def test_a_hub_that_cannot_start_is_reported_to_all_ranks(machines: Machines, tmp_path: Path) -> None:
    """Without the report, the other ranks would wait for rank 0 forever."""
    (tmp_path / "file").touch()
    machines.folder = tmp_path / "file" / "run"
    with ExitStack() as stack:
        first, second = machines.join(stack)
    assert isinstance(first, OSError) and second is None
