"""The planner's input: facts and measurements copied from the store, and the layout read from the run's folder.

`reported` and `measured` copy data under the store's lock; `basis` reads files, so a screen calls it in the worker
thread.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from agents.protocol import Value
from cockpit.data.diagnosis.evidence import trusted
from cockpit.data.store import Store, Topic
from cockpit.knobs.values import value_knobs
from engine.config.knob_values import with_knobs
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, RefusedError
from engine.config.toml import LAYOUT_FILE, load

if TYPE_CHECKING:
    from engine.planner.hardware.description import Hardware

SETTLING = 2  # steps after a change that are not measured: caches and allocators are still cold
FEWEST = 4  # measured steps for a set of knob values
MOST_STEPS = 128  # the newest steps for each set of knob values

Values = tuple[tuple[str, Value], ...]


class NoLayoutError(RefusedError):
    """Raised if the planner can make no predictions for this run; the message says why."""


@dataclass(frozen=True)
class Reported:
    """The facts that the run reports about itself. `values`: the knob values in force. `capacity`: the size in bytes of
    the smallest device memory that a rank reports; on CPUs, a rank's equal share of its machine's memory. `limit`: on
    CPUs, a phrase that says how the memory is shared; otherwise empty.
    """

    folders: tuple[Path, ...]
    digest: str
    device: str
    hardware: str
    cores: int
    shared: bool
    values: Values
    capacity: int | None
    limit: str


@dataclass(frozen=True)
class Steps:
    """Measured steps that ran with one set of knob values: the duration of each step, and the mean time that a step
    spent in exposed collectives, both in seconds."""

    values: Values
    step_s: tuple[float, ...]
    exchange_s: float | None


@dataclass(frozen=True)
class Measured:
    """The measurements that the planner is fitted to. `loads[layer][expert]`: the newest expert loads (numbers of
    tokens). `error`: mean relative error of the step times that the run's previews predicted; None if no preview was
    checked."""

    steps: tuple[Steps, ...] = ()
    loads: tuple[tuple[int, ...], ...] = ()
    error: float | None = None


@dataclass(frozen=True)
class Basis:
    """What the planner's predictions for a run are based on: the layout with the knob values in force, and the
    hardware. `assumed`: a note if the run's hardware is unknown and another is assumed, otherwise ""."""

    layout: Layout
    hardware: "Hardware"
    on_cpu: bool
    assumed: str = ""


def reported(store: Store, folder: Path | None) -> Reported | None:
    """What the run currently reports about itself; None until a rank has joined."""
    return store.once("plan.reported", (Topic.BOARD, Topic.GRID), lambda: _reported(store, folder), folder)


def _reported(store: Store, folder: Path | None) -> Reported | None:
    leader = next((hello for hello in store.state.hellos.values() if hello.leader), None)
    leader = leader or next(iter(store.state.hellos.values()), None)
    if leader is None:
        return None
    named = store.fact("folder")
    folders = [folder] if folder else []
    if isinstance(named, str) and "\0" not in named and Path(named) != folder:
        folders.append(Path(named))
    hardware = store.fact("hardware")
    capacity, limit = _capacity(store, leader.device)
    board = store.state.board
    return Reported(
        tuple(folders),
        leader.layout,
        leader.device,
        hardware if isinstance(hardware, str) else "",
        store.number("cores") or 1,
        store.oversubscribed,
        tuple((knob.name, knob.value) for knob in value_knobs(board)) if board else (),
        capacity,
        limit,
    )


def on_cpu(device: str) -> bool:
    """Whether a rank's device is a CPU."""
    return device.lower().startswith("cpu")


def _capacity(store: Store, device: str) -> tuple[int | None, str]:
    vitals = store.state.vitals
    if not on_cpu(device):
        return min(
            (one.device_memory_total for one in vitals.values() if one.device_memory_total), default=None
        ), ""
    per_host = Counter(hello.host for hello in store.state.hellos.values())
    shares = [
        (
            one.host_memory_total // per_host[store.state.hellos[rank].host],
            per_host[store.state.hellos[rank].host],
        )
        for rank, one in vitals.items()
        if one.host_memory_total and rank in store.state.hellos
    ]
    if not shares:
        return None, ""
    share, ranks = min(shares)
    return share, f"one of {ranks} shares of the machine's memory"


def measured(store: Store) -> Measured:
    """What the run has measured: its newest steps grouped by knob values, its newest expert loads, and the mean error
    of the step times that its previews predicted. The caller holds the store's lock."""
    found: dict[Values, list[tuple[float, float | None]]] = {}
    for values, steps in groupby(store.state.summaries, key=lambda one: tuple(sorted(one.knobs.items()))):
        for summary in list(steps)[SETTLING:]:
            lanes = [
                lane.exposed_ms for axis, lane in summary.comm.items() if axis in ("tp", "cp", "ep", "dp")
            ]
            found.setdefault(values, []).append((summary.step_ms / 1e3, sum(lanes) / 1e3 if lanes else None))
    experts, trust = store.state.experts, trusted(store).get("step_ms")
    return Measured(
        tuple(_steps(values, rows[-MOST_STEPS:]) for values, rows in found.items() if len(rows) >= FEWEST),
        tuple(tuple(layer.load) for layer in experts.layers) if experts else (),
        trust.mean_error if trust else None,
    )


def _steps(values: Values, rows: Sequence[tuple[float, float | None]]) -> Steps:
    exchanges = [exchange for _, exchange in rows if exchange is not None]
    mean = sum(exchanges) / len(exchanges) if exchanges else None
    return Steps(values, tuple(seconds for seconds, _ in rows), mean)


def basis(run: Reported) -> Basis:
    """Read the run's layout and find the description of the hardware that it runs on. Raises NoLayoutError, whose
    message is one sentence."""
    from engine.planner.hardware.cpu import CPU_CORE
    from engine.planner.what_if import machine_of_run

    layout = with_knobs(_layout(run), dict(run.values))
    hardware = _named_machine(run.hardware)
    if hardware is None:
        hardware = machine_of_run(layout, run.device, run.cores)
    cpu = hardware.device is CPU_CORE.device
    assumed = ""
    if cpu and not on_cpu(run.device):
        assumed = f"{run.device} is not a known machine: times are planned for CPU cores"
    if run.capacity:
        device = structs.replace(hardware.device, memory_bytes=float(run.capacity))
        hardware = structs.replace(hardware, device=device)
    return Basis(layout, hardware, cpu, assumed)


def _named_machine(name: str) -> "Hardware | None":
    from engine.planner.hardware.table import hardware

    try:
        return hardware(name) if name else None
    except RefusedError:
        return None


def _layout(run: Reported) -> Layout:
    """The layout of the run: the first layout file in its folders that has the digest reported by the run."""
    why = "the run names no folder with its layout"
    for folder in run.folders:
        path = folder / LAYOUT_FILE
        if not path.exists():
            why = f"{folder} has no {LAYOUT_FILE}, which engine run writes"
            continue
        try:
            layout = load(path)
        except LayoutError as error:
            why = str(error)
            continue
        if layout.digest() == run.digest:
            return layout
        why = f"{path} is the layout of another run"
    raise NoLayoutError(why)
