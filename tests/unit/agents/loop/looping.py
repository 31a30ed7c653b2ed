"""A plain Python training loop whose ranks exchange data over sockets. test_loop runs it as one process per rank.

python looping.py RANK WORLD RUNS PORT [agree]
"""

import os
import socket
import struct
import sys
import time
from pathlib import Path

import agents

ADDRESS = os.environ.get("MASTER_ADDR", "127.0.0.1")


class Ring:
    """An all-gather of bytes through rank 0, for `agree=`."""

    def __init__(self, rank: int, world: int, port: int) -> None:
        self.rank = rank
        if rank == 0:
            with socket.create_server((ADDRESS, port)) as server:
                self.others = [server.accept()[0] for _ in range(world - 1)]
        else:
            self.others = [self._reach(port)]

    def _reach(self, port: int) -> socket.socket:
        for _ in range(200):
            try:
                return socket.create_connection((ADDRESS, port))
            except OSError:
                time.sleep(0.05)
        raise SystemExit("rank 0 cannot be reached")

    def __call__(self, mine: bytes) -> list[bytes]:
        if self.rank:
            self._send(self.others[0], struct.pack("!I", self.rank) + mine)
            count = struct.unpack("!I", self._receive(self.others[0]))[0]
            return [self._receive(self.others[0]) for _ in range(count)]
        said = {0: mine}
        for other in self.others:
            word = self._receive(other)
            said[struct.unpack("!I", word[:4])[0]] = word[4:]
        for other in self.others:
            self._send(other, struct.pack("!I", len(said)))
            for rank in sorted(said):
                self._send(other, said[rank])
        return [said[rank] for rank in sorted(said)]

    @staticmethod
    def _send(to: socket.socket, data: bytes) -> None:
        to.sendall(struct.pack("!I", len(data)) + data)

    def _receive(self, of: socket.socket) -> bytes:
        return self._exactly(of, struct.unpack("!I", self._exactly(of, 4))[0])

    @staticmethod
    def _exactly(of: socket.socket, count: int) -> bytes:
        data = b""
        while len(data) < count:
            data += of.recv(count - len(data)) or sys.exit("a rank has left")  # type: ignore[operator]
        return data


def main(rank: int, world: int, runs: Path, port: int, together: bool) -> None:
    ring = Ring(rank, world, port)
    agent = agents.join(
        run="somebody",
        rank=rank,
        world=world,
        axes={"dp": rank},
        agree=ring if together else None,
        run_dir=runs / "somebody",
    )
    accumulate = 4

    def set_accumulate(value: int) -> None:
        nonlocal accumulate
        accumulate = value
        with (runs / f"applied-{rank}").open("a") as file:
            file.write(f"{agent.doing[0]} {value}\n")

    if together:
        agent.knob("grad_accum", int, legal=[1, 2, 4, 8], value=4, apply=set_accumulate, loss_neutral=True)
    stop = runs / "stop"
    while not any(b"stop" in word for word in ring(b"stop" if stop.exists() else b"go")):
        with agent.step() as step:
            with step.phase("forward"):
                time.sleep(0.002 * accumulate)
            with step.phase("backward"):
                time.sleep(0.004)
            step.report(loss=2.0 + rank, tokens=100 * (rank + 1))
    agent.close()


if __name__ == "__main__":
    rank, world, runs, port = sys.argv[1:5]
    main(int(rank), int(world), Path(runs), int(port), "agree" in sys.argv[5:])
