"""Measures the hub with thousands of ranks: its CPU time and memory, and the delay between the sending of a record and
its arrival at a subscriber.

python -m tests.bench scale [--quick] [--relays | --memory]

`--relays` runs only the measurements with relays; `--memory` runs only two measurements, for ten minutes each.
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
from statistics import quantiles

import msgspec
import zmq

from agents import protocol
from agents.client import Client
from agents.protocol import Credit, codec
from agents.rundir.hub_file import HUB_FILE
from agents.rundir.socket_directory import endpoints_in, make_socket_directory, remove_sockets

ROOT = Path(__file__).parents[3]
TICKS_S = os.sysconf("SC_CLK_TCK")
FLEETS = 2  # processes of fake ranks
SECONDS, QUICK_S, SHORT_S, MEMORY_S = 30.0, 8.0, 20.0, 600.0  # length of a measurement
SAMPLE = 16  # one in SAMPLE updates is decoded to measure its delay
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
    """The first fields of a step record, up to and including the field of the step time. The simulated ranks put the
    time of sending into that field, so that the benchmark can compute the delay of the record. This benchmark decodes
    no other fields."""

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
    """A subscriber that reads all updates and decodes few of them. If `hz` is given, the subscriber receives only the
    latest values, at that rate."""

    endpoint: str
    hz: float = 0.0
    epoch: str = ""
    seq: int = 0
    credit: int = 0
    updates: int = 0
    resets: int = 0
    received: int = 0  # bytes
    ages_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set(zmq.LINGER, 0)
        self._dealer.connect(self.endpoint)

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.credit == 0:
                credit = Credit(protocol.VERSION, self.epoch, self.seq, 64, self.hz)
                self._dealer.send(codec.encode([credit]))
                self.credit = 64
            if self._dealer.poll(50):
                self._take(self._dealer.recv())

    def _take(self, frame: bytes) -> None:
        now_ms = time.monotonic() * 1e3
        self.credit -= 1
        self.received += len(frame)
        (body,) = _frame.decode(frame)[1]
        self.epoch, self.seq = body.epoch, body.seq
        self.resets += body.begins
        if body.snapshot:
            return
        self.updates += len(body.updates)
        for raw in body.updates[:: 1 if self.hz else SAMPLE]:
            if b"\xa4step" in bytes(raw)[:8]:
                sent_ms = _head.decode(raw).sent_ms
                if sent_ms > 1:
                    self.ages_ms.append(now_ms - sent_ms)

    def forget(self) -> None:
        self.ages_ms.clear()
        self.updates = self.received = self.resets = 0

    def close(self) -> None:
        self._dealer.close()
        self._context.term()


def percentile(values: list[float], percent: int) -> float:
    return quantiles(values, n=100, method="inclusive")[percent - 1] if len(values) > 1 else float("nan")


class Hub:
    """A hub process that can be restarted with the same folder and sockets."""

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.endpoints = endpoints_in(make_socket_directory())
        sockets = str(self.endpoints.directory)
        self._command = [sys.executable, "-m", "agents.hub", "--run", "r", "--dir", self._folder.name]
        self._command += ["--sockets", sockets, *options]
        self.start()

    def start(self) -> None:
        (Path(self._folder.name) / HUB_FILE).unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, cwd=ROOT)
        while not (Path(self._folder.name) / HUB_FILE).exists():
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        remove_sockets(self.endpoints)
        self._folder.cleanup()


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    processes = [
        subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def fleet(endpoint: str, world: int, hz: float, *flags: str, processes: int = FLEETS) -> list[list[str]]:
    share = world // processes
    return [
        ["tests.bench.hub.fleet", endpoint, *map(str, (world, n * share, (n + 1) * share, hz, *flags))]
        for n in range(processes)
    ]


@dataclass
class Measured:
    seconds: float
    core: float  # CPU time of all threads, as a share of one core
    published: (
        float  # updates a second that the hub published; less than the ranks send if the machine is too busy
    )
    memory: list[float]  # MiB


def measure(pid: int, watcher: Watcher, seconds: float) -> Measured:
    """Measure CPU time and memory of a process while `watcher` is subscribed."""
    watcher.forget()
    memory, first = [memory_mib(pid)], watcher.seq
    began_cpu, began = cpu_s(pid), time.monotonic()
    while (left := seconds - (time.monotonic() - began)) > 0:
        watcher.watch(min(5.0, left))
        memory.append(memory_mib(pid))
    took = time.monotonic() - began
    return Measured(took, (cpu_s(pid) - began_cpu) / took, (watcher.seq - first) / took, memory)


def print_measured(what: str, measured: Measured, watcher: Watcher) -> None:
    memory, seconds = measured.memory, measured.seconds
    sevenths = [memory[round(place * (len(memory) - 1) / 6)] for place in range(7)]
    print(
        f"  {what}: {measured.core:6.1%} of a core for {measured.published:.0f} updates/s,"
        f" age p50 {percentile(watcher.ages_ms, 50):.0f}"
        f" p99 {percentile(watcher.ages_ms, 99):.0f} ms, client {watcher.updates / seconds:.0f} updates/s"
        f" in {watcher.received / seconds / 1e6:.2f} MB/s, {watcher.resets} snapshots,"
        f" memory {', '.join(f'{mib:.0f}' for mib in sevenths)} MiB from start to end",
        flush=True,
    )


def load(
    what: str, world: int, hz: float, seconds: float, *flags: str, watch_hz: float = 0.0, record: bool = False
) -> None:
    hub = Hub(*(() if record else ("--record-mb", "0")))
    with contextlib.closing(hub), running(*fleet(hub.endpoints.ranks, world, hz, *flags)):
        watcher = Watcher(hub.endpoints.clients, watch_hz)
        watcher.watch(6.0 + world / 2000)
        print_measured(what, measure(hub.process.pid, watcher, seconds), watcher)
        watcher.close()


def node(ranks: int, seconds: float) -> None:
    hub = Hub("--record-mb", "0")
    command = ["agents.hub.relay", "--run", "r", "--hub", hub.endpoints.ranks]
    with contextlib.closing(hub), running(command) as (relay,):
        assert relay.stdout
        endpoint = relay.stdout.readline().strip()
        with running(*fleet(endpoint, ranks, 10, processes=1)):
            watcher = Watcher(hub.endpoints.clients)
            watcher.watch(4.0)
            print_measured(f"relay of {ranks} ranks at 10 Hz", measure(relay.pid, watcher, seconds), watcher)
            watcher.close()
        relay.terminate()


def storm(ranks: int) -> None:
    hub = Hub("--record-mb", "0")
    with contextlib.closing(hub), running(*fleet(hub.endpoints.ranks, ranks, 1)):
        client = Client(hub.endpoints.clients)
        while len(client.state.steps) < ranks:
            client.poll(0.1)
        epoch = client.epoch
        hub.kill()
        time.sleep(1.0)
        began = time.monotonic()
        hub.start()
        listens_s = time.monotonic() - began
        while client.epoch == epoch or len(client.state.hellos) < ranks:
            client.poll(0.05)
        print(
            f"  {ranks} ranks reconnect to a restarted hub: all known {time.monotonic() - began:.1f} s after the"
            f" start of the hub, which listens after {listens_s:.1f} s; {cpu_s(hub.process.pid):.1f} s of CPU time",
            flush=True,
        )
        client.close()


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, FILES), most))
    relayed = ("16384 ranks at 10 Hz through 256 relays, watched at 1 Hz", 16_384, 10.0)
    if "--memory" in sys.argv:
        load(" 1024 ranks at 10 Hz, recorded", 1024, 10, MEMORY_S, record=True)
        load(*relayed, MEMORY_S, "--relays=64", watch_hz=1.0)
        return
    seconds = QUICK_S if "--quick" in sys.argv else SECONDS
    load(" 4096 ranks at 5 Hz through 512 relays", 4096, 5, seconds, "--relays=8")
    many = "16384 ranks at 10 Hz through 2048 relays, watched at 1 Hz"
    load(many, 16_384, 10, seconds, "--relays=8", watch_hz=1.0)
    load(*relayed, seconds, "--relays=64", watch_hz=1.0)
    if "--relays" in sys.argv:
        return
    short = min(seconds, SHORT_S)
    load(" 1024 ranks at 10 Hz", 1024, 10, seconds)
    load(" 1024 ranks at 10 Hz, one step per frame", 1024, 10, short, "--singly")
    load(" 1024 ranks at 10 Hz, recorded", 1024, 10, short, record=True)
    load(" 4096 ranks at 5 Hz", 4096, 5, seconds)
    load("16384 ranks at 1 Hz", 16_384, 1, seconds)
    for ranks in (8, 64):
        node(ranks, short)
    storm(1024)


if __name__ == "__main__":
    main()
