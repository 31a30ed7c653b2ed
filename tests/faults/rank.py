"""A simple rank in its own process: it has an agent, simulates steps of a given duration, and applies commands and
acknowledges them.

python -m tests.faults.rank --hub ENDPOINT --rank N --world N [--step-s S]
"""

import argparse
import signal
import subprocess
import sys
import threading
import time

from agents.protocol import Ack
from agents.protocol import Board as BoardMessage
from agents.rank.agent import Agent
from tests.unit.agents.fleet import environment, make_board, make_hello, make_step, make_summary


class RankProcess:
    """A rank that a test may kill, suspend and resume."""

    def __init__(self, endpoint: str, rank: int, world: int, step_s: float = 0.02) -> None:
        options = ["--hub", endpoint, "--rank", str(rank), "--world", str(world), "--step-s", str(step_s)]
        command = [sys.executable, "-m", "tests.faults.rank", *options]
        self.process = subprocess.Popen(command, env=environment())
        self.rank = rank

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--step-s", type=float, required=True)
    options = parser.parse_args()
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    step, since_s, board = 0, time.monotonic(), make_board()
    agent = Agent(options.hub, lambda: (step, "tp all-gather, layer 2", since_s))

    def introduce() -> None:
        leads = options.rank == 0
        shown = BoardMessage(0, board.revision, board.digest(), board.states()) if leads else None
        agent.introduce(make_hello(options.rank, options.world, revision=board.revision, step=step), shown)

    introduce()
    while not over.wait(options.step_s):
        step, since_s = step + 1, time.monotonic()
        agent.send(make_step(options.rank, step))
        if options.rank == 0:
            agent.send(make_summary(step))
        command = agent.pending
        if command:  # correct only with a single rank, because several ranks would have to vote
            board.commit(command.revision, command.changes, board.prepare(command.changes))
            introduce()
            agent.settle(Ack(options.rank, command.revision, "applied", step, board.digest()))
    agent.close()


if __name__ == "__main__":
    main()
