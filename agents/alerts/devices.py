"""Detectors for devices and hosts: memory nearly full, clocks throttled."""

from agents.alerts.finding import Finding, name_of, names_of
from agents.protocol import Value, Vitals
from agents.state.run_state import RunState

FULL, FULL_RELEASE = (
    0.95,
    0.92,
)  # shares of the memory in use above which the alert is raised, and below which it ends
SLOWING_REASONS = ("thermal", "power")  # throttle reasons that slow down the device and can be fixed


def _has_new(seen: dict[int, Vitals], vitals: dict[int, Vitals]) -> bool:
    """Whether `vitals` has records that are not in `seen`; adds them to `seen`."""
    news = any(seen.get(rank) is not one for rank, one in vitals.items())
    seen.update(vitals)
    return news


class Memory:
    """Detects a device or host whose memory is nearly full."""

    holds, releases = 3, 3

    def __init__(self) -> None:
        self._full: set[str] = set()
        self._seen: dict[int, Vitals] = {}

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        if not _has_new(self._seen, state.vitals):
            return None
        used: dict[str, tuple[int, str, int | None, int | None]] = {}
        for rank, vitals in state.vitals.items():
            if rank in state.gone:
                continue
            hello = state.hellos.get(rank)
            device = (f"rank {rank}", f"the device of {name_of(state, rank)}")
            used[device[0]] = (rank, device[1], vitals.device_memory_bytes, vitals.device_memory_total)
            if hello and vitals.host_memory_total is not None:
                host = f"host {hello.host}"[:64]
                used[host] = (
                    rank,
                    f"the machine {hello.host}",
                    vitals.host_memory_bytes,
                    vitals.host_memory_total,
                )
        findings = []
        for subject, (rank, name, bytes_, total) in used.items():
            share = bytes_ / total if bytes_ is not None and total else 0.0
            if share <= (FULL_RELEASE if subject in self._full else FULL):
                self._full.discard(subject)
                continue
            self._full.add(subject)
            text = f"{name} has {share:.0%} of its {(total or 0) / 2**30:.1f} GiB of memory in use"
            findings.append(Finding("memory", subject, "warning", text, {"share": round(share, 3)}, (rank,)))
        return findings


class Throttle:
    """Detects devices throttled by heat or a power limit; one alert per reason."""

    holds, releases = 4, 4

    def __init__(self) -> None:
        self._seen: dict[int, Vitals] = {}

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        if not _has_new(self._seen, state.vitals):
            return None
        slowed: dict[str, list[int]] = {}
        for rank, vitals in state.vitals.items():
            for reason in vitals.throttle or []:
                if rank not in state.gone and any(word in reason for word in SLOWING_REASONS):
                    slowed.setdefault(reason, []).append(rank)
        return [self._finding(state, reason, sorted(ranks)) for reason, ranks in slowed.items()]

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
