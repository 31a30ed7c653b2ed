"""Measures the time from the command to the first training step of the 8-rank demo with its hub."""

from statistics import median

from tests.bench.runs import demo

RUNS = 5


def main() -> None:
    begins, ends = [], []
    for _ in range(RUNS):
        began, steps = demo("train.steps=2")
        begins.append(steps[0]["time_s"] - began)
        ends.append(steps[0]["time_s"] + steps[0]["step_ms"] / 1e3 - began)
    print(
        f"first step begins after {median(begins):.2f} s (of {RUNS}: {min(begins):.2f} to {max(begins):.2f})"
    )
    print(f"first step is done after {median(ends):.2f} s (of {RUNS}: {min(ends):.2f} to {max(ends):.2f})")
