"""A hub in a real process, and ranks that behave like those of a trainer."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import zmq
from msgspec import structs

import agents
from agents import protocol
from agents.client import Client
from agents.protocol import Ack, AnyMessage, Hello, Legal, Message, Step, Summary, Update, Value, codec
from agents.protocol import Board as BoardMessage
from agents.rank.agent import Agent
from agents.rank.knob_board import Knob, KnobBoard, Values
from agents.rundir.hub_file import read_hub_file
from agents.rundir.local_machine import this_host, this_machine
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets
from agents.transport.curve_keys import Key

SOURCE = Path(agents.__file__).parent.parent
DEADLINE_S = 60.0  # deadline of `poll_until`; long, because the machine may be busy


def environment() -> dict[str, str]:
    """Environment variables for a process that imports the package from this source tree."""
    return os.environ | {"PYTHONPATH": str(SOURCE)}


class HubProcess:
    """The hub process of run `r`. Each start uses the same folder and sockets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.endpoints = endpoints_in(make_socket_directory())
        self.program = [sys.executable, "-m", "agents.hub"]  # `tests.faults.scaled` changes its constants
        self.process: subprocess.Popen[bytes]

    def start(self, *options: str) -> "HubProcess":
        command = [*self.program, "--run", "r", "--dir", str(self.folder)]
        sockets = ["--sockets", str(self.endpoints.directory)]
        self.process = subprocess.Popen([*command, *sockets, *options], env=environment())
        return self

    def listens(self) -> bool:
        """Whether the hub process accepts connections. It writes the run's hub file only after it has opened its
        sockets."""
        with contextlib.suppress(RunError):
            return read_hub_file(self.folder).pid == self.process.pid
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()
        remove_sockets(self.endpoints)


def make_hello(rank: int, world: int, **fields: object) -> Hello:
    known: dict[str, object] = {
        "version": protocol.VERSION,
        "run": "r",
        "rank": rank,
        "world": world,
        "coords": {"dp": rank},
        "host": this_host(),
        "pid": os.getpid(),
        "device": "cpu",
        "layout": "the-layout",
        "machine": this_machine(),
        "revision": 0,
        "step": 0,
        "leader": rank == 0,
    }
    return Hello(**known | fields)  # type: ignore[arg-type]


def make_step(rank: int, step: int) -> Step:
    return Step(rank, step, 0, 0, 10.0, {"forward": 4.0}, 64, {"dp": protocol.Traffic(1024, 1.0, 0.5)})


def make_summary(step: int) -> Summary:
    return Summary(
        step=step,
        revision=0,
        time_s=0.0,
        loss=2.0,
        grad_norm=1.0,
        step_ms=10.0,
        tokens_per_s=6400.0,
        mfu=None,
        bubble=0.1,
        bubble_bound=0.1,
        oversubscribed=False,
        a2a_bytes=0,
        comm={},
        dropped=0,
        load_max_over_mean=None,
        knobs={},
    )


def make_board() -> KnobBoard:
    def knob(name: str, choices: list[Value]) -> Knob:
        return Knob(name, lambda _: Legal(choices), True, "", lambda _: None, lambda _: None)

    knobs = [knob("micro_batches", [1, 2, 4, 8]), knob("recompute", ["none", "full"])]
    return KnobBoard(knobs, {"micro_batches": 4, "recompute": "none"})


class Fleet:
    """Simulates all ranks of a run in the test's own process. The ranks apply and acknowledge commands at a step
    boundary, as a trainer does."""

    def __init__(self, endpoint: str, world: int = 4, key: Key | None = None) -> None:
        self.step = 0
        self.boards = [make_board() for _ in range(world)]
        self.agents = [Agent(endpoint, lambda: self.doing(), key=key) for _ in range(world)]
        self.carried_out: list[int] = []
        self.introduce()

    def introduce(self) -> None:
        for rank, (agent, board) in enumerate(zip(self.agents, self.boards, strict=True)):
            hello = make_hello(rank, len(self.agents), revision=board.revision, step=self.step)
            shown = BoardMessage(0, board.revision, board.digest(), board.states()) if rank == 0 else None
            agent.introduce(hello, shown)

    def doing(self) -> tuple[int, str, float]:
        """The current operation of each rank; a test may replace this method."""
        return self.step, "forward", time.monotonic()

    def step_ms(self, values: Values) -> float:
        """The step time; a test may change it."""
        return 10.0

    def turn(self) -> None:
        """Simulate one training step: send the records of all ranks, and apply a pending command."""
        self.step += 1
        for rank, agent in enumerate(self.agents):
            agent.send(make_step(rank, self.step))
        values = self.boards[0].values
        self.agents[0].send(
            structs.replace(make_summary(self.step), knobs=values, step_ms=self.step_ms(values))
        )
        command = self.agents[0].pending
        if command:
            self.carried_out.append(command.revision)
            before = self.boards[0].in_force(command.changes)
            try:
                for board in self.boards:
                    board.commit(command.revision, command.changes, board.prepare(command.changes))
            except ValueError as error:
                self.agents[0].settle(Ack(0, command.revision, "rejected", self.step, "d", str(error)))
                return
            self.introduce()
            for rank, (agent, board) in enumerate(zip(self.agents, self.boards, strict=True)):
                agent.settle(Ack(rank, command.revision, "applied", self.step, board.digest(), before=before))

    def close(self, linger_s: float = 0.1) -> None:
        """Close all agents. `linger_s`: maximum seconds for which each agent tries to send its last messages."""
        for agent in self.agents:
            agent.close(linger_s)


class Peer:
    """A plain DEALER socket that can send frames that no agent or client would send."""

    def __init__(self, endpoint: str, key: Key | None = None) -> None:
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        if key:
            self.dealer.set(zmq.CURVE_SERVERKEY, key.hub.encode())
            self.dealer.set(zmq.CURVE_PUBLICKEY, key.public.encode())
            self.dealer.set(zmq.CURVE_SECRETKEY, key.secret.encode())
        self.dealer.connect(endpoint)

    def say(self, *messages: Message) -> None:
        self.dealer.send(codec.encode(messages))

    def hear(self, kind: type[Message], timeout_s: float = DEADLINE_S) -> AnyMessage:
        deadline = time.monotonic() + timeout_s
        while self.dealer.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            for message in codec.decode(self.dealer.recv()):
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def close(self) -> None:
        self.dealer.close()
        self.context.term()


def poll_until(
    client: Client, true: Callable[[], object], turn: Callable[[], None] = lambda: None
) -> list[Update]:
    """Poll the client until the condition `true` holds. Before each poll, call `turn`, for example to run the ranks'
    steps. Returns all updates received."""
    deadline = time.monotonic() + DEADLINE_S
    seen: list[Update] = []
    while not true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        turn()
        seen += client.poll(0.02)
    return seen
