"""Where two balanced stages idle, one core each, beside the schedule's simulation and the textbook.

Medians over the steps of each run, RUNS runs for each number of micro-batches. A micro-batch is one sequence, and takes
a stage well over 20 ms each way; both stages have the same layers, and the head adds two percent to the last one.
"""

from statistics import median

from tests.bench.runs import demo

MICRO_BATCHES = (2, 4, 8, 16)
RUNS, STEPS, WARM_UP = 3, 10, 3
BALANCED = [
    *("grid.pp=2", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "schedule.name=1f1b"),
    *("model.moe=none", "model.layers=8", "model.d_model=256", "model.seq_len=320", "model.kv_heads=4"),
    *(f"train.steps={STEPS}", "--hub", "none"),
]


def main() -> None:
    print("   m   micro-batch      idle = schedule +    wait + overhead   simulated   textbook")
    for m in MICRO_BATCHES:
        for _ in range(RUNS):
            _, events = demo(*BALANCED, f"train.global_batch={m}", f"knobs.micro_batches={m}")
            steps = events[WARM_UP:]
            idle, bound = (median(step[key] for step in steps) for key in ("bubble", "bubble_bound"))
            parts = [
                median(step["bubble_parts"][part] for step in steps)
                for part in ("schedule", "wait", "overhead")
            ]
            window_ms = median(step["step_ms"] for step in steps)
            shares = "   ".join(f"{100 * share:5.1f} %" for share in (idle, *parts, bound, 1 / (m + 1)))
            print(f"  {m:2}   {window_ms * (1 - idle) / m:8.1f} ms   {shares}", flush=True)
