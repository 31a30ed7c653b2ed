"""A fake of the module `pynvml` of nvidia-ml-py, for tests on machines without a GPU.

The fake has the functions that `agents.rank.sensors.nvml` calls, with their names, arguments, units and errors; a test
compares the names with those of the real module. A test sets what a device returns, and which functions it does not
support.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """Base class of all errors, like that of the real module."""


@dataclass
class Device:
    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    gpu: int = 93
    used: int = 70 << 30
    total: int = 80 << 30
    milliwatts: int = 611_500
    limit_milliwatts: int = 700_000
    celsius: int = 61
    clocks: dict[int, int] = field(default_factory=lambda: {1: 1755, 2: 2619})
    reasons: int = 0x1
    refuses: set[str] = field(default_factory=set)  # functions that raise "Not Supported"


class FakeNvml:
    """The devices of one machine, in PCI bus order."""

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2

    def __init__(self, *devices: Device, driver: bool = True) -> None:
        self.devices = devices
        self.driver = driver

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Device:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:
        found = [device for device in self.devices if device.uuid == uuid]
        if not found:
            raise NVMLError("Not Found")
        return found[0]

    def nvmlDeviceGetUUID(self, device: Device) -> str:
        return device.uuid

    def nvmlDeviceGetName(self, device: Device) -> str:
        return device.name

    def nvmlDeviceGetUtilizationRates(self, device: Device) -> Any:
        return self._answer(
            device, "nvmlDeviceGetUtilizationRates", SimpleNamespace(gpu=device.gpu, memory=40)
        )

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:
        memory = SimpleNamespace(used=device.used, total=device.total, free=device.total - device.used)
        return self._answer(device, "nvmlDeviceGetMemoryInfo", memory)

    def nvmlDeviceGetPowerUsage(self, device: Device) -> Any:
        return self._answer(device, "nvmlDeviceGetPowerUsage", device.milliwatts)

    def nvmlDeviceGetEnforcedPowerLimit(self, device: Device) -> Any:
        return self._answer(device, "nvmlDeviceGetEnforcedPowerLimit", device.limit_milliwatts)

    def nvmlDeviceGetTemperature(self, device: Device, sensor: int) -> Any:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._answer(device, "nvmlDeviceGetTemperature", device.celsius)

    def nvmlDeviceGetClockInfo(self, device: Device, clock: int) -> Any:
        return self._answer(device, "nvmlDeviceGetClockInfo", device.clocks[clock])

    def nvmlDeviceGetCurrentClocksEventReasons(self, device: Device) -> Any:
        return self._answer(device, "nvmlDeviceGetCurrentClocksEventReasons", device.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: Device) -> Any:
        return self._answer(device, "nvmlDeviceGetCurrentClocksThrottleReasons", device.reasons)

    def _answer(self, device: Device, function: str, answer: Any) -> Any:
        if function in device.refuses:
            raise NVMLError("Not Supported")
        return answer
