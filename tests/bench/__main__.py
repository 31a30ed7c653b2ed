"""`make bench`: runs the benchmarks of docs/measurements.md and prints their results. Nothing is asserted.

python -m tests.bench [NAME ...] [OPTION ...]

Without names, all benchmarks run. With `--quick`, the benchmarks `plan`, `scale`, `screens`, `simulate` and `hour` are
shorter. With `--memory`, the benchmark `scale` measures only the hub's memory; with `--relays`, it measures only ranks
that are connected through relays. With `--pairs`, the benchmark `plan` also lists the pairs of layouts that are
predicted in the wrong order.
"""

import sys

from tests.bench.app import hour, screens, simulate
from tests.bench.hub import recording, scale, soak
from tests.bench.planner import autopilot, plan, predict, preview
from tests.bench.training import (
    adapters,
    bubble,
    checkpoint,
    collectives,
    documents,
    gpu,
    overhead,
    single,
    start,
    telemetry,
    tensor,
    wrap,
)

BENCHES = {
    "start": start.main,
    "telemetry": telemetry.main,
    "overhead": overhead.main,
    "recording": recording.main,
    "collectives": collectives.main,
    "bubble": bubble.main,
    "tensor": tensor.main,
    "single": single.main,
    "scale": scale.main,
    "screens": screens.main,
    "soak": soak.main,
    "hour": hour.main,
    "gpu": gpu.main,
    "plan": plan.main,
    "predict": predict.main,
    "simulate": simulate.main,
    "preview": preview.main,
    "autopilot": autopilot.main,
    "adapters": adapters.main,
    "documents": documents.main,
    "wrap": wrap.main,
    "checkpoint": checkpoint.main,
}

OPTIONS = ("--quick", "--memory", "--relays", "--pairs")

JOBS = autopilot.JOBS if "autopilot" in sys.argv else {}  # only the named jobs run

names = [word for word in sys.argv[1:] if "=" not in word and word not in (*OPTIONS, *JOBS)]
if unknown := [name for name in names if name not in BENCHES]:
    sys.exit(f"{unknown[0]} is neither a bench nor an option; legal: {', '.join((*BENCHES, *OPTIONS))}")
for name in names or BENCHES:
    print(f"\n== {name}", flush=True)
    BENCHES[name]()
