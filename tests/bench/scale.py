"""The hub under thousands of ranks: its share of a core, how old a record is when a watcher has it, its memory.

python -m tests.bench scale [--long]
"""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from agents import codec, runs, wire
from agents.wire import Credit

ROOT = Path(__file__).parents[2]
TICKS_S = os.sysconf("SC_CLK_TCK")
FLEETS = 2  # processes of fake ranks
SAMPLE = 16  # one update in so many is opened for its age
FILES = 20_000


def cpu_s(pid: int) -> float:
    """CPU time of a process and all its threads so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def memory_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Head(msgspec.Struct, array_like=True):
    """The beginning of a step, which is all that this bench reads of it."""

    kind: str
    rank: int
    step: int
    seq: int
    revision: int
    sent_ms: float


class Body(msgspec.Struct, array_like=True):
    kind: str
    epoch: str
    seq: int
    updates: list[msgspec.Raw]
    begins: bool
    snapshot: int


_frame = msgspec.msgpack.Decoder(tuple[int, list[Body]])
_head = msgspec.msgpack.Decoder(Head)


@dataclass
class Watcher:
    """A subscriber that reads everything and opens little of it."""

    dealer: zmq.Socket[bytes]
    epoch: str = ""
    seq: int = 0
    credit: int = 0
    updates: int = 0
    resets: int = 0
    bytes: int = 0
    ages_ms: list[float] = field(default_factory=list)

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.credit < 8:
                self.dealer.send(codec.encode([Credit(wire.VERSION, self.epoch, self.seq, 32)]))
                self.credit = 32
            if self.dealer.poll(50):
                self._take(self.dealer.recv())

    def _take(self, frame: bytes) -> None:
        now_ms = time.monotonic() * 1e3
        self.credit -= 1
        self.bytes += len(frame)
        (body,) = _frame.decode(frame)[1]
        self.epoch, self.seq = body.epoch, body.seq
        self.resets += body.begins
        if body.snapshot:
            return
        self.updates += len(body.updates)
        for raw in body.updates[::SAMPLE]:
            if bytes(raw)[1:6] == b"\xa4step" or bytes(raw)[3:8] == b"\xa4step":
                self.ages_ms.append(now_ms - _head.decode(raw).sent_ms)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


@contextlib.contextmanager
def hub(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], runs.Endpoints]]:
    with tempfile.TemporaryDirectory() as folder:
        endpoints = runs.endpoints_in(runs.make_socket_directory())
        command = [sys.executable, "-m", "agents.hub", "--run", "r", "--dir", folder, *options]
        process = subprocess.Popen([*command, "--sockets", str(endpoints.directory)], cwd=ROOT)
        while not (Path(folder) / runs.HUB_FILE).exists():
            time.sleep(0.01)
        try:
            yield process, endpoints
        finally:
            process.kill()
            process.wait()
            runs.remove_sockets(endpoints)


@contextlib.contextmanager
def fleet(endpoint: str, world: int, hz: float, *flags: str) -> Iterator[None]:
    share = world // FLEETS
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.bench.fleet", endpoint]
            + [str(one) for one in (world, place * share, (place + 1) * share, hz, *flags)],
            cwd=ROOT,
        )
        for place in range(FLEETS)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def load(world: int, hz: float, seconds: float, *flags: str) -> None:
    with hub() as (process, endpoints), fleet(endpoints.ranks, world, hz, *flags):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        watcher = Watcher(context.socket(zmq.DEALER))
        watcher.dealer.set(zmq.LINGER, 0)
        watcher.dealer.connect(endpoints.clients)
        watcher.watch(5.0 + world / 2000)
        watcher.ages_ms.clear()
        watcher.updates = watcher.bytes = watcher.resets = 0
        memory, began_cpu, began = memory_mib(process.pid), cpu_s(process.pid), time.monotonic()
        watcher.watch(seconds)
        took = time.monotonic() - began
        share = (cpu_s(process.pid) - began_cpu) / took
        ages = watcher.ages_ms
        print(
            f"  {world:>6} ranks at {hz:g} Hz: hub {share:6.1%} of a core,"
            f" age p50 {percentile(ages, 0.5):.0f} p99 {percentile(ages, 0.99):.0f} ms,"
            f" {watcher.updates / took / world / hz:.0%} seen, {watcher.resets} snapshots,"
            f" {watcher.bytes / took / 1e6:.1f} MB/s,"
            f" memory {memory:.0f} to {memory_mib(process.pid):.0f} MiB",
            flush=True,
        )
        watcher.dealer.close()
        context.term()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for world, hz in ((1024, 10), (4096, 5), (16_384, 1)):
        load(world, hz, 10.0)


if __name__ == "__main__":
    main()
