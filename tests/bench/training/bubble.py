"""Measures the idle time of two balanced stages with one core each, and prints it next to the values that the
simulation of the schedule and the textbook formula give.

Other processes on the host make some actions longer. The benchmark therefore takes medians over only a few steps of
each run: those whose actions took the least time in total. For each number of micro-batches there are RUNS runs. A
micro-batch is one sequence; its forward and backward take about 50 ms on a stage. Both stages have the same number of
layers; the head makes the last stage slightly slower.
"""

from statistics import median
from typing import Any

from tests.bench.runs import demo

MICRO_BATCHES = (2, 4, 8, 16)
RUNS, STEPS, WARM_UP, LEAST_DISTURBED = 3, 33, 3, 4
BALANCED = [
    *("grid.pp=2", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "schedule.name=1f1b"),
    *("model.moe=none", "model.layers=8", "model.d_model=256", "model.seq_len=160", "model.kv_heads=4"),
    *(f"train.steps={STEPS}", "--hub", "none"),
]


def main() -> None:
    print("   m   micro-batch      idle = schedule +    wait + overhead   simulated   textbook")
    for m in MICRO_BATCHES:
        for _ in range(RUNS):
            _, events = demo(*BALANCED, f"train.global_batch={m}", f"knobs.micro_batches={m}")
            steps = sorted(events[WARM_UP:], key=_busy_ms)[:LEAST_DISTURBED]
            idle, bound = (median(step[key] for step in steps) for key in ("bubble", "bubble_bound"))
            parts = [
                median(step["bubble_parts"][part] for step in steps)
                for part in ("schedule", "wait", "overhead")
            ]
            micro_batch_ms = median(map(_busy_ms, steps)) / m
            shares = "   ".join(f"{100 * share:5.1f} %" for share in (idle, *parts, bound, 1 / (m + 1)))
            print(f"  {m:2}   {micro_batch_ms:8.1f} ms   {shares}", flush=True)


def _busy_ms(step: dict[str, Any]) -> float:
    return float(step["step_ms"] * (1 - step["bubble"]))
