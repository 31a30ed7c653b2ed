"""`make bench`: the measurements of docs/measurements.md, as ratios within one run. Nothing is asserted.

python -m tests.bench [NAME ...] [--quick | --memory] (the options apply only to scale)
"""

import sys

from tests.bench import (
    bubble,
    collectives,
    gpu,
    overhead,
    recording,
    scale,
    single,
    soak,
    start,
    telemetry,
    tensor,
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
    "soak": soak.main,
    "gpu": gpu.main,
}

for name in [word for word in sys.argv[1:] if not word.startswith("--")] or BENCHES:
    print(f"\n== {name}", flush=True)
    BENCHES[name]()
