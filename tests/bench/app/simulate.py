"""Measures the CPU time and memory of the simulator, the hub and the app while a simulated run is watched and steered.

    python -m tests.bench simulate [--quick]

Each run takes ten minutes (--quick: one minute). Every ten seconds the benchmark changes a knob and waits until all
ranks have applied the change. The app renders its overview screen headless at 200 x 60 cells. CPU time is in percent
of one core; memory is resident memory in MiB.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agents.client import Client
from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import RunError
from agents.waiting import wait_for_command
from tests.bench.hub.scale import cpu_s, memory_mib
from tests.bench.hub.soak import APP

ROOT = Path(__file__).parents[3]
SECONDS, QUICK_S = 600.0, 60.0
LOOKS = 10
CHANGE_S = 10.0
LAYOUT = "layouts/frontier/deepseek-v3.toml"
RUNS = {  # ranks and speed: overrides
    "1024 ranks in real time": ("--speed", "1", "grid.dp_shard=64", "train.global_batch=7680"),
    "4096 ranks in real time": ("--speed", "1", "grid.dp_shard=256", "train.global_batch=30720"),
    "4096 ranks at ten times real time": ("--speed", "10", "grid.dp_shard=256", "train.global_batch=30720"),
}


def started(folder: Path) -> str:
    """Wait until the hub of the run listens, and return its endpoint for clients."""
    while True:
        with contextlib.suppress(RunError):
            return read_hub_file(folder).endpoints.clients
        time.sleep(0.1)


def measure(what: str, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as parent, contextlib.ExitStack() as stack:
        folder = Path(parent) / "run"
        command = [sys.executable, "-m", "engine", "simulate", LAYOUT, *RUNS[what], "--run-dir", str(folder)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        engine = stack.enter_context(subprocess.Popen([*command, "--steps", "1000000"], cwd=ROOT, **quiet))  # type: ignore[call-overload]
        stack.callback(engine.kill)
        client = Client(started(folder))
        stack.callback(client.close)
        client.set_subscription(1.0)
        app = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", APP, started(folder)], cwd=ROOT, **quiet)  # type: ignore[call-overload]
        )
        stack.callback(app.kill)
        while not client.state.summaries or not client.state.board:
            client.poll(0.2)
        pids = {"simulator": engine.pid, "hub": read_hub_file(folder).pid, "app": app.pid}
        time.sleep(5.0)
        step_s = client.state.summaries[-1].step_ms / 1e3
        print(f"{what}, {step_s:.1f} simulated seconds a step", flush=True)
        began, changes, waited = time.monotonic(), 0, []
        for look in range(LOOKS):
            cpu, at = {name: cpu_s(pid) for name, pid in pids.items()}, time.monotonic()
            while time.monotonic() - began < (look + 1) * seconds / LOOKS:
                client.poll(0.5)
                if time.monotonic() - began >= (changes + 1) * CHANGE_S:
                    changes += 1
                    asked = time.monotonic()
                    id = client.propose({"lr_scale": (1.0, 0.5)[changes % 2]}, who="bench")
                    with contextlib.suppress(TimeoutError):
                        wait_for_command(client, id, 120.0)
                        waited.append(time.monotonic() - asked)
            took = time.monotonic() - at
            told = "".join(
                f"{name} {100 * (cpu_s(pid) - cpu[name]) / took:5.1f} % {memory_mib(pid):6.1f} MiB   "
                for name, pid in pids.items()
            )
            print(
                f"  {time.monotonic() - began:5.0f} s  {told}step {client.state.summaries[-1].step}",
                flush=True,
            )
        late = sorted(waited)[len(waited) // 2] if waited else float("nan")
        print(
            f"  {changes} changes, {len(waited)} in force on all ranks, median after {late:.1f} s", flush=True
        )


def main() -> None:
    for what in RUNS:
        measure(what, QUICK_S if "--quick" in sys.argv else SECONDS)


if __name__ == "__main__":
    measure(sys.argv[1], float(sys.argv[2]))
