"""A rank on one core of a server CPU, where nobody has measured the machine.

Orders of magnitude only: what uses it scales the planner's times by a run's telemetry (`engine/planner/refit.py`).
`engine probe` measures the machine.
"""

from engine.planner.hardware.description import Device, Efficiency, Hardware, Link

SOURCE = "assumed: order of magnitude of one core with AVX2, and of gloo over loopback"

CPU_CORE = Hardware(
    "cpu",
    Device(8 * 2**30, 1e10, {"fp32": 5e10, "bf16": 2e10}, SOURCE),
    (Link("loopback", None, 1e-4, 1e9, SOURCE),),
    # An operation takes 15 us of the host, which runs all of them.
    Efficiency(gemm=0.8, half_rows=16.0, attention=0.4, memory=0.6, link=0.8, operation=1.5e-5),
)
