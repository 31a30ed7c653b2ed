"""Compares predictions with measurements on this machine: `python -m tests.bench predict [--in=DIR]`.

For each parallelism grid (sizes of pp, dp, cp, tp and ep) in `tests/bench/planner/predict_ranks.py`, the benchmark
measures the hardware with `engine probe` and then runs the layouts that have this grid. The planner predicts the step
time of each layout from these measurements of the hardware. With `--in`, the results of probes and runs are kept in
DIR, and those that DIR already has are not repeated.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from engine.config.layout import Layout
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import load as load_hardware
from engine.planner.memory.plan import plan_memory
from engine.planner.timing.predict import predict
from engine.planner.timing.step import Prediction
from engine.planner.workload.communication.traffic import traffic
from engine.planner.workload.job import Job
from tests.bench.planner.predict_ranks import DEMO, LAYOUTS, layout_of

ROOT = Path(__file__).parents[3]
APART = 0.15  # minimum relative difference of the measured times of two layouts that are compared
AXES = ("dp", "tp", "pp", "ep", "cp")


@dataclass(frozen=True)
class Result:
    """Prediction and measurements of one layout."""

    name: str
    layout: Layout
    hardware: Hardware
    prediction: Prediction
    ranks: list[dict[str, Any]]  # what each rank measured

    @property
    def seconds(self) -> float:
        return median(self.ranks[0]["seconds"])

    @property
    def error(self) -> float:
        return self.prediction.step_s[1] / self.seconds - 1

    @property
    def held(self) -> bool:
        low, _, high = self.prediction.step_s
        return low <= self.seconds <= high

    def memory(self) -> tuple[float, float]:
        """Predicted and measured peak bytes of live tensor storages, on the rank with the highest peak. The prediction
        uses the expert imbalance that this rank measured."""
        rank = max(range(len(self.ranks)), key=lambda n: self.ranks[n]["peak"])
        job = replace(Job.of(self.layout), imbalance=max(1.0, self.ranks[rank]["imbalance"]))
        pp = self.layout.ranks.coords(rank)["pp"]
        return plan_memory(job, gloo=True).ranks[pp].total, self.ranks[rank]["peak"]


def grid_of(layout: Layout) -> str:
    """The name of a grid, such as pp2-dp2-ep2."""
    grid = layout.ranks
    sizes = {"pp": grid.pp, "dp": grid.dp, "cp": grid.cp, "tp": grid.tp, "ep": grid.ep}
    return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)


def collect(folder: Path) -> list[Result]:
    """Run `engine probe` for each parallelism grid, and then run its layouts, unless the folder already has the
    results."""
    found = []
    for name in sorted(LAYOUTS, key=lambda name: grid_of(layout_of(name))):
        layout = layout_of(name)
        probed = folder / f"{grid_of(layout)}.toml"
        if not probed.exists():
            command = [
                sys.executable,
                "-m",
                "engine",
                "probe",
                str(DEMO),
                *LAYOUTS[name],
                "--out",
                str(probed),
            ]
            subprocess.run([*command, "--device", "cpu"], cwd=ROOT, check=True, capture_output=True)
        if not (folder / name).exists():
            subprocess.run(
                [sys.executable, "-m", "tests.bench.planner.predict_ranks", str(folder), name],
                cwd=ROOT,
                check=True,
                capture_output=True,
            )
        ranks = [
            json.loads((folder / name / f"{rank}.json").read_text()) for rank in range(layout.ranks.world)
        ]
        hardware = load_hardware(probed)
        found.append(Result(name, layout, hardware, predict(Job.of(layout), hardware), ranks))
    return found


def times(found: list[Result]) -> list[str]:
    """The table of predicted and measured step times."""
    lines = [
        "| layout | ranks | predicted, ms | interval | measured, ms | p10 to p90 | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in found:
        low, middle, high = (1e3 * seconds for seconds in result.prediction.step_s)
        ordered = sorted(1e3 * seconds for seconds in result.ranks[0]["seconds"])
        spread = f"{ordered[len(ordered) // 10]:.0f} to {ordered[-1 - len(ordered) // 10]:.0f}"
        lines.append(
            f"| {result.name} | {result.layout.ranks.world} | {middle:.0f} | {low:.0f} to {high:.0f} | "
            f"{1e3 * result.seconds:.0f} | {spread} | {result.error:+.0%} |"
        )
    errors = sorted(abs(result.error) for result in found)
    held = sum(result.held for result in found)
    return [
        *lines,
        f"error: mean {sum(errors) / len(errors):.0%}, median {median(errors):.0%}, worst {errors[-1]:.0%}; "
        f"the interval holds {held} of {len(found)}",
    ]


def order(found: list[Result]) -> str:
    """A line that reports for how many pairs of layouts the planner correctly predicts which layout is faster. Pairs
    whose measured times differ by no more than `APART` are left out."""
    pairs = [sorted(pair, key=lambda r: r.seconds) for pair in combinations(found, 2)]
    apart = [(fast, slow) for fast, slow in pairs if fast.seconds * (1 + APART) < slow.seconds]
    right = sum(fast.prediction.step_s[1] < slow.prediction.step_s[1] for fast, slow in apart)
    return f"order: {right} of {len(apart)} pairs that differ by more than {APART:.0%}"


def sent(found: list[Result]) -> list[str]:
    """A line that reports how many predicted byte counts equal the measured counts, and a line for each rank and axis
    with a wrong prediction."""
    compared, wrong = 0, []
    for result in found:
        for rank, measured in enumerate(result.ranks):
            planned = traffic(Job.of(result.layout), rank, rows=measured["rows"])
            for axis in AXES:
                compared += 1
                if planned[axis] != measured["bytes"][axis]:
                    wrong.append(
                        f"{result.name} rank {rank} {axis}: {planned[axis]:.0f}, not {measured['bytes'][axis]}"
                    )
    return [f"bytes: {compared - len(wrong)} of {compared} (layout, rank, axis) exact", *wrong]


def memory(found: list[Result]) -> list[str]:
    lines = ["| layout | predicted, MiB | measured, MiB | error |", "|---|---|---|---|"]
    for result in found:
        planned, peak = result.memory()
        lines.append(
            f"| {result.name} | {planned / 2**20:.2f} | {peak / 2**20:.2f} | {planned / peak - 1:+.0%} |"
        )
    return lines


def main() -> None:
    kept = next((word.removeprefix("--in=") for word in sys.argv if word.startswith("--in=")), None)
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        report(collect(Path(kept)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        report(collect(Path(temporary)))


def report(found: list[Result]) -> None:
    print("\n".join(times(found)))
    print(order(found))
    print("\n".join(sent(found)))
    print("\n".join(memory(found)))


if __name__ == "__main__":
    main()
