"""Measures the overhead of `cockpit wrap`: one process, which has its own hub, trains in alternating blocks with and
without the hooks (ABBA).

The first steps of a block are not counted. The benchmark reports two ratios, each with hooks to without hooks: that of
the mean step times, and that of the mean CPU times of the process per step (which include the agent's threads).
"""

import os
import subprocess
import sys
import tempfile
import time
from statistics import mean, median
from typing import Any

from tests.bench.training.overhead import ABBA, interval

STEPS, SKIPPED, GROUPS = 24, 4, 6
JOIN_S = 120.0
ROWS = {"transformer of 4 layers": 4, "almost nothing, and sleep": 0}  # layers
SLEEP_S = 0.06  # so that each step is reported


def main() -> None:
    print(
        "| training | step without, median | with / without, wall | with / without, CPU | CPU, difference |"
    )
    print("|---|---|---|---|---|")
    for row in ROWS:  # each in its own process, because a process joins one run
        print(subprocess.check_output([sys.executable, "-m", __name__, row], text=True).strip(), flush=True)


def measure(name: str, layers: int) -> None:
    """Print one row."""
    import torch

    from agents.wrap.hooks import Hooks
    from agents.wrap.watch import Watch

    torch.set_num_threads(1)
    sys.argv = ["bench"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COCKPIT_RUNS"] = folder
        hooks = Hooks()
        watch = Watch(hooks)
        watch.listen()
        train = training(layers)
        deadline = time.monotonic() + JOIN_S
        while watch._loop is None and time.monotonic() < deadline:
            train()
        if watch._loop is None:
            raise SystemExit("the process did not join a run")
        groups = []
        for _ in range(GROUPS):
            took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            for on in ABBA:
                hooks.on = on
                took[on].append(block(train))
            groups.append({on: [mean(column) for column in zip(*took[on], strict=True)] for on in took})
        hooks.on = True
        hooks.end()
    wall, cpu = ([one[True][n] / one[False][n] for one in groups] for n in (0, 1))
    extra_ms = median(1e3 * (one[True][1] - one[False][1]) for one in groups)
    step_ms = 1e3 * median(one[False][0] for one in groups)
    ratios = f"{interval(wall)} | {interval(cpu)}"
    print(f"| {name} | {step_ms:.0f} ms | {ratios} | {extra_ms:+.2f} ms |", flush=True)


def training(layers: int) -> Any:
    """A function that runs one training step of a small transformer. With `layers=0`, this function trains a linear
    layer and then sleeps, so that the hooks take most of the CPU time of a step."""
    import torch

    model: torch.nn.Module = torch.nn.Linear(128, 1)
    if layers:
        layer = torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)
        model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.utils.data.DataLoader(torch.randn(8 * 2000, 64, 128), batch_size=8)  # type: ignore[arg-type]
    batches = iter(data)

    def step() -> None:
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()
        if not layers:
            time.sleep(SLEEP_S)

    return step


def block(train: Any) -> tuple[float, float]:
    """Mean wall time and mean CPU time of a step, in seconds."""
    for _ in range(SKIPPED):
        train()
    began = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        train()
    return (time.perf_counter() - began[0]) / STEPS, (time.process_time() - began[1]) / STEPS


if __name__ == "__main__":
    measure(sys.argv[1], ROWS[sys.argv[1]])
