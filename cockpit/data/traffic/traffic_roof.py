"""The network link that limits an axis's collectives according to the planner's hardware table, for comparison with the
run's measurements."""

from typing import NamedTuple

from cockpit.data.store import Store, Topic
from cockpit.data.traffic.traffic import AxisTraffic, Group, groups
from engine.config.refusal import RefusedError
from engine.planner.hardware.cpu import CPU_CORE
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import by_device, hardware
from engine.planner.timing.collectives import share_inside


class Roof(NamedTuple):
    """The link that limits the collectives of an axis. `bytes_per_s`: the rate per rank that large collectives reach on
    the link. `bytes_ms`: the time that a rank needs to send its bytes of one step over this link at that rate.
    `assumed`: the planner's hardware table does not list the machine, so the values are accurate only to an order of
    magnitude.
    """

    machine: str
    link: str
    bytes_per_s: float
    latency_s: float
    bytes_ms: float
    assumed: bool


def machine(store: Store) -> Hardware | None:
    """The hardware description for a run: the one that the run's fact `hardware` names, else the one of the machine in
    the planner's table that has the run's device, else a CPU core for a run on CPUs. None: unknown."""
    return store.once("machine", (Topic.GRID,), lambda: _machine(store))


def _machine(store: Store) -> Hardware | None:
    named = store.fact("hardware")
    try:
        if isinstance(named, str) and named:
            return hardware(named)
    except RefusedError:
        pass
    device = next((hello.device for hello in store.state.hellos.values()), "")
    return by_device(device) or (CPU_CORE if device.startswith("cpu") else None)


def roof(store: Store, row: AxisTraffic) -> Roof | None:
    """The link that limits the collectives of an axis, and its rate. None if the hardware or the axis's process groups
    are unknown, or if these groups have only one rank. A group that spans nodes sends part of its bytes inside a node
    and the rest between nodes, so the link on which the bytes take longer limits the collective.
    """
    known, group = machine(store), groups(store).get(row.axis)
    if known is None or group is None or group.ranks < 2 or not row.world:
        return None
    inside = _inside(row.axis, group)
    sent = row.traffic.bytes / row.world
    inner, outer = known.links[0], known.links[-1]
    share = known.efficiency.link
    times = [
        (sent * inside / (inner.bandwidth * share), inner),
        (sent * (1 - inside) / (outer.bandwidth * share), outer),
    ]
    seconds, link = max(times, key=lambda one: one[0])
    return Roof(known.name, link.name, link.bandwidth * share, link.latency, 1e3 * seconds, known is CPU_CORE)


def _inside(axis: str, group: Group) -> float:
    """The fraction of its bytes that a group of the axis sends inside a node."""
    if group.hosts <= 1:
        return 1.0
    together = -(-group.ranks // group.hosts)
    return share_inside(axis, together, group.ranks) if together > 1 else 0.0
