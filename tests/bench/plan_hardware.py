"""Draft hardware of the published rows."""

from engine.planner.hardware.description import Device, Efficiency, Hardware, Link

T = 1e12
#        memory GB, TB/s, bf16, fp8, nvfp4, NVLink GB/s, domain, network GB/s a GPU
ROWS = {
    "A100-80GB": (80, 2.039, 312, 312, 312, 300, 8, 25),
    "A100-80GB-800G": (80, 2.039, 312, 312, 312, 300, 8, 12.5),
    "A100-40GB": (40, 1.555, 312, 312, 312, 300, 8, 25),
    "H100": (80, 3.35, 989.4, 1978.9, 1978.9, 450, 8, 50),
    "H200-4": (141, 4.8, 989.4, 1978.9, 1978.9, 450, 4, 50),
    "H800": (80, 3.35, 989.4, 1978.9, 1978.9, 200, 8, 50),
    "B200": (180, 7.7, 2250, 4500, 9000, 900, 8, 50),
    "B300": (270, 7.7, 2250, 4500, 13500, 900, 8, 100),
    "GB200": (186, 8.0, 2500, 5000, 10000, 900, 64, 50),
    "GB300": (279, 8.0, 2500, 5000, 15000, 900, 64, 100),
}


def hardware(name: str, efficiency: Efficiency) -> Hardware:
    memory, bandwidth, bf16, fp8, nvfp4, nvlink, domain, network = ROWS[
        "H100" if name == "H100-80GB" else name
    ]
    return Hardware(
        name,
        Device(memory * 1e9, bandwidth * T, {"bf16": bf16 * T, "fp8": fp8 * T, "nvfp4": nvfp4 * T}, "draft"),
        (
            Link("NVLink", domain, 3.4e-6, nvlink * 1e9, "draft"),
            Link("network", None, 14e-6, network * 1e9, "draft"),
        ),
        efficiency,
    )
