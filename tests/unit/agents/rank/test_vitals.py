"""Vitals (sensor values of a rank's GPU and host): each rank reads its own GPU, and a GPU or value that cannot be read
is reported as missing. The tests use a fake NVML module."""

import sys
from types import ModuleType
from typing import Any

import pytest

from agents.client import Client
from agents.protocol import Vitals
from agents.rank.sensors import nvml, vitals
from agents.rank.sensors.nvml import REASONS, Gpu, NoDevice
from agents.rank.sensors.vitals import Reader, Sensors, open_gpu, open_host
from tests.unit.agents.conftest import Opened
from tests.unit.agents.fake_nvml import Device, FakeNvml
from tests.unit.agents.fleet import Agent, HubProcess, make_hello, poll_until

A, B, C = Device("GPU-aaaa-1"), Device("GPU-bbbb-2", gpu=20), Device("GPU-bbcc-3", gpu=30)
UNEQUAL = Device("GPU-dddd-4", name="NVIDIA A100-SXM4-80GB", gpu=40)


def which(device: str | int, devices: tuple[Device, ...] = (A, B, C), **environ: str) -> str:
    """The UUID of the device that is read. The device is identified by its utilization, which differs between the
    devices."""
    percent = Gpu(FakeNvml(*devices), device, environ).read()["device_percent"]
    return next(one.uuid for one in devices if one.gpu == percent)


@pytest.mark.parametrize(
    ("device", "environ", "uuid"),
    [
        ("GPU-bbbb-2", {}, B.uuid),
        # in torch's notation; the environment variable does not affect a UUID
        (
            "bbbb-2",
            {"CUDA_VISIBLE_DEVICES": "0"},
            B.uuid,
        ),
        (1, {}, B.uuid),
        (0, {"CUDA_VISIBLE_DEVICES": "2,0"}, C.uuid),
        (1, {"CUDA_VISIBLE_DEVICES": "2, 0"}, A.uuid),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2"}, B.uuid),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}, A.uuid),  # abbreviated, as CUDA allows
        (0, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}, B.uuid),
    ],
)
def test_the_device_that_the_rank_computes_on(device: str | int, environ: dict[str, str], uuid: str) -> None:
    assert which(device, **environ) == uuid


@pytest.mark.parametrize(
    ("device", "environ"),
    [
        (3, {}),
        (1, {"CUDA_VISIBLE_DEVICES": "2"}),
        (0, {"CUDA_VISIBLE_DEVICES": ""}),
        (1, {"CUDA_VISIBLE_DEVICES": "1,-1,0"}),  # CUDA ignores all entries after an invalid one
        (0, {"CUDA_VISIBLE_DEVICES": "7"}),
        (0, {"CUDA_VISIBLE_DEVICES": "GPU-bb"}),  # matches two devices
        ("GPU-none", {}),
        ("none", {}),
    ],
)
def test_a_missing_device_is_not_replaced_by_another(device: str | int, environ: dict[str, str]) -> None:
    with pytest.raises(NoDevice):
        which(device, **environ)


def test_different_devices_need_bus_order_for_a_number() -> None:
    with pytest.raises(NoDevice, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        which(1, (A, UNEQUAL))
    assert which(1, (A, UNEQUAL), CUDA_DEVICE_ORDER="PCI_BUS_ID") == UNEQUAL.uuid
    assert which(UNEQUAL.uuid, (A, UNEQUAL)) == UNEQUAL.uuid


def test_device_readings_are_converted_to_our_units() -> None:
    found = Vitals(3, 7, **Gpu(FakeNvml(A), A.uuid, {}).read())
    assert (found.device_percent, found.device_memory_bytes, found.device_memory_total) == (
        93.0,
        70 << 30,
        80 << 30,
    )
    assert (found.power_w, found.power_limit_w, found.temperature_c) == (611.5, 700.0, 61.0)
    assert (found.sm_mhz, found.memory_mhz) == (1755, 2619)
    assert found.throttle == []  # being idle is not a throttle reason


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0x4, ["power cap"]),
        (0x20 | 0x1, ["thermal"]),
        (0x8 | 0x40, ["hw slowdown", "hw thermal"]),
        (0x80 | 0x8, ["hw slowdown", "hw power brake"]),
        (1 << 40, []),  # an unknown reason
    ],
)
def test_throttle_reasons_are_readable(bits: int, words: list[str]) -> None:
    assert Gpu(FakeNvml(Device("GPU-x", reasons=bits)), "GPU-x", {}).read()["throttle"] == words


def test_an_unsupported_reading_is_missing_and_the_others_stay() -> None:
    names = [name for name in vars(FakeNvml) if name.startswith("nvmlDeviceGet")]
    silent = Gpu(FakeNvml(Device("GPU-x", refuses=set(names))), "GPU-x", {}).read()
    assert set(silent.values()) == {None}
    assert Reader([lambda: silent]).read(0, 1) is None
    part = Device("MIG-x", refuses={"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"})
    read = Gpu(FakeNvml(part), "x", {}).read()
    assert (
        read["device_percent"] is None and read["power_w"] is None and read["device_memory_bytes"] == 70 << 30
    )


def test_an_older_driver_has_the_older_name_of_the_reasons() -> None:
    old = Device("GPU-x", reasons=0x4, refuses={"nvmlDeviceGetCurrentClocksEventReasons"})
    assert Gpu(FakeNvml(old), "GPU-x", {}).read()["throttle"] == ["power cap"]


def test_zero_is_data() -> None:
    idle = Device("GPU-x", gpu=0, used=0, milliwatts=0)
    read = Gpu(FakeNvml(idle), "GPU-x", {}).read()
    assert (read["device_percent"], read["device_memory_bytes"], read["power_w"]) == (0.0, 0, 0.0)


def test_the_fake_has_the_names_of_the_real_module() -> None:
    real = pytest.importorskip("pynvml")
    for name in vars(FakeNvml):
        if name.startswith(("nvml", "NVML")):
            assert hasattr(real, name), name
    for name in ("NVML_TEMPERATURE_GPU", "NVML_CLOCK_SM", "NVML_CLOCK_MEM"):
        assert getattr(real, name) == getattr(FakeNvml, name)
    known = {value for name, value in vars(real).items() if name.startswith("nvmlClocksThrottleReason")}
    assert set(REASONS) <= known


def test_without_package_driver_or_device_there_is_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_gpu("GPU-x", module="no_such_module") is None
    module: Any = ModuleType("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert open_gpu("GPU-x") is None  # an unrelated module with the same name
    vars(module).update({name: getattr(FakeNvml(driver=False), name) for name in dir(FakeNvml)})
    assert open_gpu("GPU-x") is None
    assert Sensors("GPU-x").open().read(0, 0) is None


def test_a_machine_that_cannot_be_read_has_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(interval: float | None = None) -> float:
        raise PermissionError(13, "Permission denied", "/proc/stat")

    monkeypatch.setattr("psutil.cpu_percent", unreadable)
    assert open_host() is None
    assert Sensors(host=True).open().read(0, 0) is None


def test_a_machine_reports_cpu_and_memory() -> None:
    host = open_host()
    assert host is not None
    found = Vitals(0, 0, **host())
    assert found.host_cpu_percent is not None and 0 <= found.host_cpu_percent <= 100
    assert found.host_memory_bytes and found.host_memory_total
    assert found.host_memory_bytes < found.host_memory_total
    assert found.device_percent is None and found.throttle is None


def test_a_lost_device_does_not_affect_other_readings() -> None:
    def lost() -> dict[str, Any]:
        raise RuntimeError("fell off the bus")

    assert Reader([lost, lambda: {"host_cpu_percent": 5.0}]).read(2, 9) == Vitals(2, 9, host_cpu_percent=5.0)
    assert Reader([lost]).read(2, 9) is None


def test_vitals_reach_a_watcher(hub: HubProcess, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "open_gpu", lambda device: nvml.Gpu(FakeNvml(A, B), device, {}))
    agent = opened(Agent(hub.endpoints.ranks, lambda: (5, "forward", 0.0), Sensors(B.uuid, host=True)))
    agent.introduce(make_hello(0, 1), None)
    client = opened(Client(hub.endpoints.clients))
    poll_until(client, lambda: 0 in client.state.vitals)
    found = client.state.vitals[0]
    assert found.step == 5 and found.temperature_c == 61.0 and found.host_memory_total
