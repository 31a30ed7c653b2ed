"""Compares the demo's step time with and without telemetry (agents and hub), in pairs of runs in ABBA order."""

import random
from statistics import median

from tests.bench.runs import demo

PAIRS = 8
STEPS = 45
WARM_UP = 5


def step_ms(hub: str) -> float:
    _, steps = demo(f"train.steps={STEPS}", "--hub", hub)
    return median(step["step_ms"] for step in steps[WARM_UP:])


def main() -> None:
    ratios = []
    for pair in range(PAIRS):
        order = ("auto", "none") if pair % 2 else ("none", "auto")
        ms = {hub: step_ms(hub) for hub in order}
        ratios.append(ms["auto"] / ms["none"])
        print(
            f"  with {ms['auto']:6.1f} ms   without {ms['none']:6.1f} ms   ratio {ratios[-1]:.4f}", flush=True
        )
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=PAIRS)) for _ in range(10_000))
    low, high = medians[250], medians[9750]
    print(
        f"step time with agents and hub / without: {median(ratios):.4f} (95 % bootstrap {low:.4f} to {high:.4f})"
    )
