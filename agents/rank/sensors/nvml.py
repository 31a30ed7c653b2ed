"""Finds a rank's GPU in NVML and reads its utilization, memory, power, temperature and clocks.

NVML numbers all devices of a machine by PCI bus and ignores CUDA_VISIBLE_DEVICES; CUDA numbers the visible devices, by
speed unless CUDA_DEVICE_ORDER is set. So a UUID is the best way to identify a device, because NVML and CUDA use the
same UUID. A CUDA index is accepted only if it identifies the same device in both device orders that CUDA can use.

The caller passes the module `pynvml` of the package nvidia-ml-py, so that this module can be imported without that
package.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agents.protocol import clip

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), in the order in which they are reported. Bit 0 (GPU is idle)
# is omitted, because low clocks while idle do not slow down training.
REASONS = {
    0x0008: "hw slowdown",
    0x0040: "hw thermal",
    0x0080: "hw power brake",
    0x0020: "thermal",
    0x0004: "power cap",
    0x0010: "sync boost",
    0x0002: "clocks setting",
    0x0100: "display clocks",
}


class NoDevice(Exception):
    """NVML cannot find the device. The message gives the reason."""


class Gpu:
    """One GPU; `read` returns its data as fields of `Vitals`. The constructor raises NoDevice if it finds no GPU."""

    def __init__(self, nvml: Any, device: str | int, environ: Mapping[str, str]) -> None:
        """`device` is a UUID, with or without its prefix, or the CUDA index in this process."""
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = (
                _by_uuid(nvml, device) if isinstance(device, str) else _by_number(nvml, device, environ)
            )
        except nvml.NVMLError as error:
            raise NoDevice(clip(f"NVML: {error}")) from None

    def read(self) -> dict[str, Any]:
        nvml, handle = self._nvml, self._handle
        use = self._query(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._query(nvml.nvmlDeviceGetMemoryInfo, handle)
        return {
            "device_percent": _float(use and use.gpu),
            "device_memory_bytes": memory and int(memory.used),
            "device_memory_total": memory and int(memory.total),
            "power_w": _float(self._query(nvml.nvmlDeviceGetPowerUsage, handle), 1e-3),
            "power_limit_w": _float(self._query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle), 1e-3),
            "temperature_c": _float(
                self._query(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "sm_mhz": self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            "memory_mhz": self._query(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            "throttle": self._reasons(),
        }

    def _reasons(self) -> list[str] | None:
        # The function was renamed in driver 535; older modules have only the old name.
        new = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        bits = self._query(new, self._handle) if new else None
        if bits is None:
            bits = self._query(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle)
        return None if bits is None else [word for bit, word in REASONS.items() if bits & bit]

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of an NVML function; None if this device or driver does not support it."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None


def _float(value: float | None, factor: float = 1.0) -> float | None:
    return None if value is None else float(value) * factor


def _by_uuid(nvml: Any, uuid: str) -> Any:
    """The NVML handle of the GPU or MIG instance with this UUID. NVML's UUIDs have a prefix, but torch omits it."""
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _by_number(nvml: Any, number: int, environ: Mapping[str, str]) -> Any:
    """The NVML handle of the GPU that has CUDA index `number` in a process with the environment `environ`."""
    every = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    seen = [str(index) for index in range(len(every))] if visible is None else _entries(visible)
    if not 0 <= number < len(seen):
        raise NoDevice(f"CUDA's device {number} is not among the {len(seen)} that this process can see")
    entry = seen[number]
    if not entry.isdecimal():
        return _by_prefix(nvml, every, entry)
    if int(entry) >= len(every):
        raise NoDevice(f"CUDA_VISIBLE_DEVICES names device {entry}, but the machine has {len(every)}")
    if (
        environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        and len({nvml.nvmlDeviceGetName(one) for one in every}) > 1
    ):
        raise NoDevice(
            f"the GPUs of this machine differ, so it is not known which one is CUDA device {entry}; name "
            "it by its UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    return every[int(entry)]


def _entries(visible: str) -> Sequence[str]:
    """The entries of CUDA_VISIBLE_DEVICES before the first invalid entry, because CUDA ignores the rest."""
    entries: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return entries


def _by_prefix(nvml: Any, every: Sequence[Any], entry: str) -> Any:
    """The device that an entry of CUDA_VISIBLE_DEVICES names by its UUID or by a unique prefix of its UUID."""
    if entry.startswith("GPU-"):
        found = [one for one in every if _text(nvml.nvmlDeviceGetUUID(one)).startswith(entry)]
        if len(found) == 1:
            return found[0]
    return nvml.nvmlDeviceGetHandleByUUID(entry)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
