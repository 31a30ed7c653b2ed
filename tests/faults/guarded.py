"""A hub that listens on TCP, with keys, ranks and clients."""

import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from agents.client import Client
from agents.rundir.hub_file import HUB_FILE, read_hub_file
from agents.transport.curve_keys import Key, KeyStore, load_key
from agents.transport.roles import Role
from tests.faults.scaled import Constants, program
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fleet import DEADLINE_S, Fleet, HubProcess, poll_until


class Guarded:
    """A hub that listens on the loopback address, its keys, and four ranks that connect over TCP."""

    def __init__(self, folder: Path, constants: Constants | None = None, options: Sequence[str] = ()) -> None:
        """`constants`: new values for constants of the hub; `options`: additional command-line options of the hub."""
        self.store = KeyStore(folder / "keys")
        self.rank = self.make("node", Role.RANK)
        self.viewer = self.make("ann", Role.VIEWER)
        self.operator = self.make("bob", Role.OPERATOR)
        self.hub = HubProcess(folder / "run")
        if constants:
            self.hub.program = program("agents.hub.process", constants)
        self.hub.start("--listen", "auto", "--keys", str(self.store.folder), *options)
        wait((folder / "run" / HUB_FILE).exists)
        listening = read_hub_file(folder / "run").tcp
        assert listening is not None
        self.url = listening.ranks
        self.fleet = Fleet(self.url, key=self.rank)

    def make(self, name: str, role: Role) -> Key:
        return load_key(self.store.make(name, role))

    def connect(self) -> socket.socket:
        """Open a plain TCP connection to the hub."""
        host, port = self.url.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=10)

    def close(self) -> None:
        self.fleet.close()
        self.hub.clean_up()


def wait(true: Callable[[], object], turn: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        turn()
        time.sleep(0.01)


def watch(guarded: Guarded, opened: Opened, key: Key | None = None) -> Client:
    """A client that has received the knob board and a step record of each of the four ranks."""
    client = opened(Client(guarded.url, key or guarded.viewer))
    poll_until(client, lambda: len(client.state.steps) == 4 and client.state.board, guarded.fleet.turn)
    return client
