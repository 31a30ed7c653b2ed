"""Prometheus export: the latest values as gauges, scraped from a live run, or written to a text file from a recording.

A missing value has no sample; it is never exported as zero.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest, make_wsgi_app
from prometheus_client.registry import Collector, CollectorRegistry

from agents.protocol import Step, Summary, Vitals
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.rundir.hub_file import read_hub_file
from agents.rundir.runs import RunError
from agents.state.run_state import RunState
from cockpit.data.link import LinkState
from cockpit.data.sources.connection import CockpitError, Connection
from cockpit.data.store import Store
from cockpit.export.files import output
from cockpit.export.http_server import BoundedServer

STALE_S = 10.0  # after this long without a message from the hub, only `cockpit_up 0` is exported
LINGER_S = 60.0  # time to listen after the end of the run, so that the last values are scraped

Number = float | int | None
Samples = Iterable[tuple[list[str], Number]]  # label values and the number


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


OF_THE_JOB: dict[str, tuple[str, Callable[[Summary], Number]]] = {
    "step": ("the newest step", lambda s: s.step),
    "knob_revision": ("the knob revision in force", lambda s: s.revision),
    "loss": ("cross-entropy", lambda s: s.loss),
    "grad_norm": ("norm of the gradient before clipping", lambda s: s.grad_norm),
    "step_seconds": ("step time of the slowest rank", lambda s: _seconds(s.step_ms)),
    "tokens_per_second": ("throughput of the whole job", lambda s: s.tokens_per_s),
    "mfu_ratio": ("model FLOPs utilisation", lambda s: s.mfu),
    "bubble_ratio": ("idle share of the pipeline", lambda s: s.bubble),
    "bubble_bound_ratio": ("smallest idle share that the schedule allows", lambda s: s.bubble_bound),
    "a2a_bytes": ("all-to-all bytes of the step, summed over all ranks", lambda s: s.a2a_bytes),
    "dropped_pairs": ("token-expert pairs dropped in the step", lambda s: s.dropped),
    "load_max_over_mean": (
        "load of the most loaded expert over the mean load",
        lambda s: s.load_max_over_mean,
    ),
    "replica_bytes": ("bytes of the step to sum gradients over replicas", lambda s: s.replica_bytes),
    "replica_bytes_plain": ("the same without compression", lambda s: s.replica_bytes_plain),
    "loss_scale": ("factor on the loss before backward, with fp16", lambda s: s.loss_scale),
    "skipped_steps": ("steps so far that did not update the weights", lambda s: s.skipped_steps),
    "learning_rate": ("learning rate of the step", lambda s: s.lr),
}
OF_A_RANK: dict[str, tuple[str, Callable[[Step], Number]]] = {
    "rank_step": ("the newest step of a rank", lambda s: s.step),
    "rank_step_seconds": ("step time of a rank", lambda s: _seconds(s.step_ms)),
    "rank_tokens": ("tokens of a rank's slice of the batch", lambda s: s.tokens),
    "rank_bubble_ratio": ("idle share of a rank's pipeline window", lambda s: s.bubble),
    "rank_memory_bytes": ("peak memory of a rank in the step", lambda s: s.memory_bytes),
    "rank_lost_records": ("records a rank dropped because its queue was full", lambda s: s.lost_records),
}
OF_A_DEVICE: dict[str, tuple[str, Callable[[Vitals], Number]]] = {
    "device_busy_percent": ("share of time in which a kernel ran", lambda v: v.device_percent),
    "device_memory_bytes": ("memory in use on the device, by all processes", lambda v: v.device_memory_bytes),
    "device_power_watts": ("power draw of the device", lambda v: v.power_w),
    "device_temperature_celsius": ("temperature of the device", lambda v: v.temperature_c),
}
UP = "1: the rank has joined; 0: it is gone"


class RunCollector(Collector):
    """The metrics of one run as Prometheus gauges. Each scrape calls `current`, which returns the run's data, or None
    if the hub does not answer. `recorded`: the data comes from a recording, because the run has no live hub.
    """

    def __init__(self, current: Callable[[], Store | None], recorded: bool = False) -> None:
        self._current = current
        self._recorded = recorded

    def collect(self) -> Iterable[GaugeMetricFamily]:
        store = self._current()
        up = GaugeMetricFamily("cockpit_up", "1: the hub of the run answers; 0: it does not")
        up.add_metric([], 0.0 if store is None or self._recorded else 1.0)
        yield up
        if store is not None:
            with store.lock:
                yield from _families(store.state, store.run)


def _families(state: RunState, run: str) -> Iterator[GaugeMetricFamily]:
    def family(
        name: str, about: str, labels: list[str], samples: Iterable[tuple[list[str], Number]]
    ) -> GaugeMetricFamily:
        made = GaugeMetricFamily(f"cockpit_{name}", about, labels=["run", *labels])
        for values, number in samples:
            if number is not None:
                made.add_metric([run, *values], float(number))
        return made

    if any(hello.simulated for hello in state.hellos.values()):
        yield family("simulated", "1: the run is a simulation", [], [([], 1)])
    if state.summaries:
        newest = state.summaries[-1]
        for name, (about, get) in OF_THE_JOB.items():
            yield family(name, about, [], [([], get(newest))])
        validated = state.newest("validation_loss")
        yield family(
            "validation_loss",
            "loss of a text that the run does not train on, as measured last",
            [],
            [([], validated[1])] if validated else [],
        )
        comm = (newest.comm or {}).items()
        yield family(
            "comm_bytes", "bytes sent in the step, by axis", ["axis"], [([a], t.bytes) for a, t in comm]
        )
        yield family(
            "comm_exposed_seconds",
            "time in collectives that compute does not hide, mean over ranks",
            ["axis"],
            [([a], _seconds(t.exposed_ms)) for a, t in comm],
        )
    yield family("rank_up", UP, ["rank"], [([str(r)], r not in state.gone) for r in state.hellos])
    for name, (about, of) in OF_A_RANK.items():
        yield family(name, about, ["rank"], [([str(r)], of(step)) for r, step in state.steps.items()])
    phases = [
        ([str(r), phase], _seconds(ms))
        for r, step in state.steps.items()
        for phase, ms in step.phases.items()
    ]
    yield family("rank_phase_seconds", "time of a phase of a rank's step", ["rank", "phase"], phases)
    for name, (about, at) in OF_A_DEVICE.items():
        yield family(name, about, ["rank"], [([str(r)], at(vitals)) for r, vitals in state.vitals.items()])
    knobs = state.board.knobs if state.board else []
    numbers = [([knob.name], knob.value) for knob in knobs if isinstance(knob.value, int | float)]
    yield family("knob", "value of a knob, if it is a number", ["knob"], numbers)
    alerts = [([alert.name, alert.subject, alert.level], 1) for alert in state.alerts.values()]
    yield family("alert", "1: the alert is active", ["name", "subject", "level"], alerts)


def _registry(current: Callable[[], Store | None], recorded: bool = False) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(RunCollector(current, recorded))
    return registry


def _is_live(folder: Path) -> bool:
    try:
        return read_hub_file(folder).live
    except RunError:
        return False


def to_prometheus(recording: Recording, out: Path | None) -> int:
    """Write the final values of a recording in Prometheus text format, which the node exporter's textfile collector
    reads. `cockpit_up` is 0 if the run has no live hub.
    """
    replay = Replay(recording)
    replay.seek(recording.at_end())
    store = Store()
    store.adopt(replay.state)
    text = generate_latest(_registry(lambda: store, recorded=not _is_live(recording.path.parent))).decode()
    with output(out) as file:
        file.write(text)
    return sum(not line.startswith("#") for line in text.splitlines())


def serve(run: str | None, address: str, port: int, started: Callable[[int], None]) -> int:
    """Serve a live run at `address` until `LINGER_S` seconds after the run has ended. Calls `started` with the port on
    which the server listens."""
    connection = Connection(run)
    store = connection.store

    def current() -> Store | None:
        return store if store.age_s is not None and store.age_s < STALE_S else None

    server = None
    try:
        connection.wait_for_snapshot()
        try:
            server = BoundedServer(address, port, make_wsgi_app(_registry(current)), "scrapes")
        except OSError as error:
            raise CockpitError(f"cannot listen on {address}:{port}: {error.strerror}") from None
        started(server.server_port)
        over_s: float | None = None
        while over_s is None or time.monotonic() - over_s < LINGER_S:
            connection.poll()
            if store.link in (LinkState.ENDED, LinkState.FAILED):
                over_s = over_s or time.monotonic()
                store.set_message_age(0.0)  # the last values stay valid until the last scrape
            else:
                over_s = None
    finally:
        if server:
            server.close()
        connection.close()
    return 0 if store.link is LinkState.ENDED else 1
