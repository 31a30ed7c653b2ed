"""The hardware that the planner assumes for a rank on one core of a server CPU if the machine was not measured.

The values are rough estimates, correct only in their order of magnitude. Callers calibrate the predicted times with a
run's telemetry (`engine/planner/refit.py`). `engine probe` measures the actual machine.
"""

from msgspec import structs

from engine.planner.hardware.description import Device, Efficiency, Hardware, Link, Measurement

SOURCE = "assumed: order of magnitude of one core with AVX2, and of gloo over loopback"

CPU_CORE = Hardware(
    "cpu",
    Device(8 * 2**30, 1e10, {"fp32": 5e10, "bf16": 2e10}, SOURCE),
    (Link("loopback", None, 1e-4, 1e9, SOURCE),),
    # The host takes at least 15 us for each operation.
    Efficiency(gemm=0.8, half_rows=16.0, attention=0.4, memory=0.6, link=0.8, operation=1.5e-5),
)


def cpu_cores(cores: int) -> Hardware:
    """The hardware description for ranks that share `cores` CPU cores. With this description, the planner adds the time
    to dispatch operations to the time of the kernels."""
    return structs.replace(CPU_CORE, measured=Measurement(ranks=1, cores=cores))
