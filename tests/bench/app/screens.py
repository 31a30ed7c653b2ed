"""Benchmarks the screens of the app: the app runs in a real pseudo-terminal and shows simulated training runs that
complete about ten steps per second.

    python -m tests.bench screens [--quick] [ranks=1024]

For each number of ranks, the benchmark measures the time until the app paints its first state, the app's CPU time (in
percent of one core) and output bytes on each screen, and the time from a key press to its effect. With
`--low-bandwidth`, the benchmark measures only the CPU time and the output bytes on the start screen.
"""

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

from agents.client import Client
from agents.rundir.hub_file import read_hub_file
from tests.bench.app.simulate import started
from tests.bench.hub.scale import cpu_s, memory_mib

ROOT = Path(__file__).parents[3]
SIZE = (60, 200)  # rows and columns
SECONDS, QUICK_S = 8.0, 3.0  # on each screen
KEYS = 40
SMALL = (
    *("model.layers=4", "model.d_model=512", "model.heads=8", "train.global_batch={batch}"),
    *("grid.pp=2", "grid.dp_shard={dp}", "grid.tp=4", "grid.ep=8", "knobs.micro_batches=4"),
)
WORLDS = (1024, 4096, 16384)
SCREENS = ("overview", "ranks", "pipeline", "experts", "traffic", "curves", "plan", "log")


BYTECODE = Path(tempfile.gettempdir()) / "cockpit-bench-bytecode"


def _environment() -> dict[str, str]:
    """Environment variables that make Python use the bytecode that `compile_modules` has written."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(BYTECODE)}


def compile_modules() -> None:
    """Compile all modules that the app imports when it starts, so that the first measured start does not compile
    them."""
    code = "import cockpit.tui.app, cockpit.tui.open, cockpit.data.sources.live as last; last.__name__"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=_environment(), check=True)


class Terminal:
    """The cockpit on a pseudo-terminal of 200 x 60 cells."""

    def __init__(self, folder: Path, *options: str):
        self.began = time.monotonic()
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        environment = _environment() | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cockpit", "attach", str(folder), *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,  # type: ignore[call-overload]
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def read(self, seconds: float, until: bytes | None = None) -> bytes:
        """Return what the app writes. Reading stops after `seconds`, or as soon as the output matches the regular
        expression `until`."""
        end, found = time.monotonic() + seconds, b""
        while (left := end - time.monotonic()) > 0:
            if select.select([self._ours], [], [], left)[0]:
                found += os.read(self._ours, 1 << 16)
                if until and re.search(until, found):
                    break
        return found

    def press(self, key: bytes) -> None:
        os.write(self._ours, key)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@contextlib.contextmanager
def simulated(world: int) -> Iterator[Path]:
    """A simulated run of `world` ranks that completes about ten steps per second."""
    overrides = [word.format(dp=world // 8, batch=world // 2) for word in SMALL]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        words = ["layouts/moe-1b.toml", *overrides, "train.steps=10000000"]
        command = [sys.executable, "-m", "engine", "simulate", *words, "--speed", "{speed}", "--run-dir"]
        speed = _speed(command, Path(parent) / "probe")
        engine = _launched([word.format(speed=speed) for word in command], folder)
        try:
            yield folder
        finally:
            engine.terminate()
            engine.wait()


def _speed(command: list[str], folder: Path) -> str:
    """The `--speed` of the simulation at which a step takes a tenth of a second."""
    engine = _launched([word.format(speed=1) for word in command], folder)
    try:
        client = Client(started(folder))
        while not client.state.summaries:
            client.poll(0.2)
        step_s = client.state.summaries[-1].step_ms / 1e3
        client.close()
    finally:
        engine.terminate()
        engine.wait()
    return f"{10 * step_s:.3f}"


def _launched(command: list[str], folder: Path) -> "subprocess.Popen[bytes]":
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen([*command, str(folder)], cwd=ROOT, **quiet)  # type: ignore[call-overload,no-any-return]


def measure(world: int, seconds: float) -> None:
    with simulated(world) as folder:
        client = Client(started(folder))
        client.set_subscription(1.0, ranks=False)
        while len(client.state.hellos) < world or not client.state.summaries:
            client.poll(0.2)
        client.close()
        hub = read_hub_file(folder).pid
        before = cpu_s(hub or 0), time.monotonic()
        terminal = Terminal(folder)
        try:
            terminal.read(30.0, b"LIVE")
            first_s, first_cpu_s = time.monotonic() - terminal.began, cpu_s(terminal.process.pid)
            terminal.read(5.0)
            print(
                f"{world} ranks: first paint after {first_s:.2f} s, {first_cpu_s:.2f} s of CPU time",
                flush=True,
            )
            for number, name in enumerate(SCREENS, 1):
                terminal.press(str(number).encode())
                terminal.read(2.0)
                _report(name, terminal, seconds)
            terminal.press(b"1")
            terminal.read(1.0)
            _report_keys("help opens", [_help_s(terminal) for _ in range(KEYS)])
            terminal.press(b"2")
            terminal.read(2.0)
            _report_keys("cursor moves", [_cursor_s(terminal, number % 2 == 0) for number in range(KEYS)])
            busy = (cpu_s(hub or 0) - before[0]) / (time.monotonic() - before[1])
            print(
                f"  hub {100 * busy:.0f} % of a core, app {memory_mib(terminal.process.pid):.0f} MiB",
                flush=True,
            )
        finally:
            terminal.close()
        slow = Terminal(folder, "--low-bandwidth")
        try:
            slow.read(30.0, b"LIVE")
            slow.read(3.0)
            _report("low bandwidth", slow, seconds)
        finally:
            slow.close()


def _report(name: str, terminal: Terminal, seconds: float) -> None:
    cpu, at = cpu_s(terminal.process.pid), time.monotonic()
    chunks = 0
    written = 0
    while time.monotonic() - at < seconds:
        part = terminal.read(0.05)
        written, chunks = written + len(part), chunks + bool(part)
    took = time.monotonic() - at
    share = 100 * (cpu_s(terminal.process.pid) - cpu) / took
    frame = written / max(1, chunks) / 1e3
    print(
        f"  {name:<14} {share:5.1f} % of a core {written / took / 1e3:7.1f} KB/s {frame:6.1f} KB a frame",
        flush=True,
    )


def _report_keys(what: str, seconds: list[float]) -> None:
    ms = sorted(1e3 * one for one in seconds)
    p95 = quantiles(ms, n=20)[-1]
    print(
        f"  key to paint, {what}: median {ms[len(ms) // 2]:.0f} ms, 95th percentile {p95:.0f} ms", flush=True
    )


def _help_s(terminal: Terminal) -> float:
    """Seconds from the key press that opens the help until the app has written the help; then closes the help."""
    took = _key_s(terminal, b"?", b"closes")
    terminal.press(b"\x1b")
    terminal.read(0.3)
    return took


def _cursor_s(terminal: Terminal, right: bool) -> float:
    """Seconds from the press of a cursor key until the inspector's title shows another rank. In a run of many ranks,
    one cell of the rank grid stands for several ranks."""
    return _key_s(terminal, b"l" if right else b"h", rb"Rank \d")


def _key_s(terminal: Terminal, key: bytes, effect: bytes) -> float:
    """Seconds from a key press until the app's output matches the regular expression `effect`; 5 if it does not match
    within 5 s."""
    terminal.read(0.05)
    began = time.monotonic()
    terminal.press(key)
    terminal.read(5.0, effect)
    return time.monotonic() - began


def main() -> None:
    compile_modules()
    seconds = QUICK_S if "--quick" in sys.argv else SECONDS
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    worlds = WORLDS[:1] if "--quick" in sys.argv else WORLDS
    for world in [int(given["ranks"])] if "ranks" in given else worlds:
        measure(world, seconds)
