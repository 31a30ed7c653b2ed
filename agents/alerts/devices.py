"""Detectors for devices and hosts: memory nearly full, clocks throttled."""

from dataclasses import dataclass

from agents.alerts.finding import Finding, name_of, names_of
from agents.protocol import Value, Vitals
from agents.state.run_state import RunState

# Shares of the memory in use above which the alert is raised, and below which it ends.
FULL, FULL_RELEASE = 0.95, 0.92
SLOWING_REASONS = ("thermal", "power")  # throttle reasons that slow down the device and can be fixed
# A busy GPU reports this reason even if its clock is only 1 % lower. So this reason counts only if the clock is below
# this share of the highest clock that any GPU of the same model has reported.
POWER_CAP, SLOWED = "power cap", 0.95


def _has_new(seen: dict[int, Vitals], vitals: dict[int, Vitals]) -> bool:
    """Whether a rank has sent new `vitals` (memory, temperature, ...) that are not in `seen`; adds them to `seen`."""
    news = any(seen.get(rank) is not one for rank, one in vitals.items())
    seen.update(vitals)
    return news


@dataclass(frozen=True)
class _Use:
    """Memory in use, in bytes, on a rank's device or host."""

    rank: int
    used: int
    total: int

    @property
    def share(self) -> float:
        return self.used / self.total

    def text(self, name: str) -> str:
        return f"{name} has {100 * self.share:.0f} % of its {self.total / 2**30:.1f} GiB of memory in use"


class Memory:
    """Detects devices and hosts whose memory is nearly full. All such devices share one alert; each such host has an
    alert of its own."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._full: set[int | str] = set()  # ranks of devices, and hosts
        self._seen: dict[int, Vitals] = {}

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        if not _has_new(self._seen, state.vitals):
            return None
        devices: dict[int | str, _Use] = {}
        hosts: dict[int | str, _Use] = {}
        for rank, vitals in state.vitals.items():
            if rank in state.gone:
                continue
            if vitals.device_memory_bytes is not None and vitals.device_memory_total:
                devices[rank] = _Use(rank, vitals.device_memory_bytes, vitals.device_memory_total)
            hello = state.hellos.get(rank)
            if hello and vitals.host_memory_bytes is not None and vitals.host_memory_total:
                hosts[hello.host] = _Use(rank, vitals.host_memory_bytes, vitals.host_memory_total)
        full, full_hosts = self._nearly_full(devices), self._nearly_full(hosts)
        self._full = {*full, *full_hosts}
        return [
            *([_devices_finding(state, list(full.values()))] if full else []),
            *(
                _memory_finding(f"host {host}"[:64], use.text(f"the machine {host}"), use, (use.rank,))
                for host, use in full_hosts.items()
            ),
        ]

    def _nearly_full(self, uses: dict[int | str, _Use]) -> dict[int | str, _Use]:
        return {
            key: use for key, use in uses.items() if use.share > (FULL_RELEASE if key in self._full else FULL)
        }


def _devices_finding(state: RunState, uses: list[_Use]) -> Finding:
    fullest = max(uses, key=lambda use: use.share)
    text = fullest.text(f"the device of {name_of(state, fullest.rank)}")
    if len(uses) > 1:
        text = f"{len(uses)} devices have little memory left: {text}"
    ranks = [fullest.rank, *sorted(use.rank for use in uses if use is not fullest)]
    return _memory_finding("devices", text, fullest, tuple(ranks))


def _memory_finding(subject: str, text: str, use: _Use, ranks: tuple[int, ...]) -> Finding:
    return Finding("memory", subject, "warning", text, {"share": round(use.share, 3)}, ranks)


class Throttle:
    """Detects devices throttled by heat or by a power limit. Each throttle reason has a separate alert, which covers
    all affected ranks."""

    holds, releases = 4, 4

    def __init__(self) -> None:
        self._seen: dict[int, Vitals] = {}
        self._highest: dict[str, int] = {}  # device model -> highest SM clock so far, in MHz

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        if not _has_new(self._seen, state.vitals):
            return None
        for rank, vitals in state.vitals.items():
            if vitals.sm_mhz is not None:
                model = _model(state, rank)
                self._highest[model] = max(self._highest.get(model, 0), vitals.sm_mhz)
        slowed: dict[str, list[int]] = {}
        for rank, vitals in state.vitals.items():
            for reason in vitals.throttle or [] if rank not in state.gone else []:
                if self._slows(reason, vitals.sm_mhz, _model(state, rank)):
                    slowed.setdefault(reason, []).append(rank)
        return [self._finding(state, reason, sorted(ranks)) for reason, ranks in slowed.items()]

    def _slows(self, reason: str, sm_mhz: int | None, model: str) -> bool:
        if reason == POWER_CAP:
            return sm_mhz is None or sm_mhz < SLOWED * self._highest[model]
        return any(word in reason for word in SLOWING_REASONS)

    def _finding(self, state: RunState, reason: str, ranks: list[int]) -> Finding:
        first = state.vitals[ranks[0]]
        seen = [
            f"{value:.0f} {unit}"
            for value, unit in ((first.temperature_c, "°C"), (first.power_w, "W"))
            if value is not None
        ]
        at = f" ({', '.join(seen)}{'' if len(ranks) == 1 else f' on rank {ranks[0]}'})" if seen else ""
        text = f"{names_of(state, ranks)}: clocks throttled by {reason}{at}"
        evidence: dict[str, Value] = {
            "temperature_c": first.temperature_c,
            "power_w": first.power_w,
            "sm_mhz": first.sm_mhz,
        }
        return Finding("throttle", reason[:64], "warning", text, evidence, tuple(ranks))


def _model(state: RunState, rank: int) -> str:
    """The model of a rank's device, such as ``NVIDIA H200`` for ``cuda:0 NVIDIA H200``; empty before its hello."""
    hello = state.hellos.get(rank)
    return hello.device.partition(" ")[2] if hello else ""
