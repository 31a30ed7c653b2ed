"""Scenarios: TOML files that list the events of a simulated cluster by step. A scenario is checked in the same way as a
layout.

[noise]
compute = 0.02

[[events]]
kind = "straggler"
step = 20
rank = 5
factor = 1.6
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.sections.bounds import Natural, Positive
from engine.config.toml import parse, read_struct, read_text, shipped
from engine.layouts import SCENARIOS

Share = Annotated[float, Meta(ge=0, le=1)]
Spread = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(ge=1, le=100)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Noise(Struct, frozen=True):
    """Standard deviations of the simulated noise, relative to the predicted values."""

    compute: Annotated[Spread, "variation of a rank's computation time between steps"] = 0.01
    device: Annotated[Spread, "variation of the computation time between devices, the same in every step"] = (
        0.005
    )
    network: Annotated[Spread, "variation of the time of collectives between steps"] = 0.03
    loss: Annotated[Spread, "variation of the loss between steps"] = 0.004


class Event(Struct, frozen=True, kw_only=True):
    """An event that begins at step `step`."""

    kind: str
    step: Annotated[Natural, "step at which it begins"]
    steps: Annotated[Positive | None, "number of steps that it lasts; absent: to the end"] = None

    def in_force(self, step: int) -> bool:
        return step >= self.step and (self.steps is None or step < self.step + self.steps)


class Straggler(Event, frozen=True, kw_only=True):
    """One rank computes slowly."""

    rank: Annotated[Natural, "the slow rank"]
    factor: Annotated[Factor, "factor on the time of its computation"] = 1.5


class Throttle(Event, frozen=True, kw_only=True):
    """The devices of a node overheat and throttle their clocks, so they compute slowly and report the throttling."""

    node: Annotated[Natural, "the throttled node"]
    factor: Annotated[Factor, "factor on the time of its computation"] = 1.4


class Slowdown(Event, frozen=True, kw_only=True):
    """All ranks compute slowly."""

    factor: Annotated[Factor, "factor on the time of their computation"] = 1.5


class Network(Event, frozen=True, kw_only=True):
    """The links of a node, or of all nodes, are slow."""

    node: Annotated[Natural | None, "the node with slow links; absent: all nodes"] = None
    factor: Annotated[Factor, "factor on the time of its collectives"] = 3.0


class Lost(Event, frozen=True, kw_only=True):
    """A node is cut off: its ranks send nothing, and all others wait for them."""

    node: Annotated[Natural, "the node that is lost"]
    seconds: Annotated[Seconds | None, "simulated seconds until it is back; absent: it never returns"] = None


class Hang(Event, frozen=True, kw_only=True):
    """One rank hangs in its computation; it still sends pulses. All other ranks wait for it."""

    rank: Annotated[Natural, "the rank that hangs"]
    seconds: Annotated[
        Seconds | None, "simulated seconds until it continues; absent: it hangs to the end"
    ] = None


class MemoryLeak(Event, frozen=True, kw_only=True):
    """The memory in use on every device grows in each step, up to 99 % of the device's memory."""

    gib: Annotated[Annotated[float, Meta(gt=0, le=1000)], "GiB that each step adds"] = 1.0


class Collapse(Event, frozen=True, kw_only=True):
    """The router sends most tokens to the same top_k experts."""

    share: Annotated[Share, "share of the pairs that go to these experts"] = 0.97
    layer: Annotated[Natural | None, "the layer; absent: every layer with experts"] = None
    ramp: Annotated[Positive, "steps until the share is reached"] = 10


class Skew(Event, frozen=True, kw_only=True):
    """Some experts become more popular than others, as after a change in the training data."""

    strength: Annotated[
        Annotated[float, Meta(gt=0, le=10)],
        "standard deviation of the logarithm of the experts' popularity",
    ] = 1.0


class LossSpike(Event, frozen=True, kw_only=True):
    """The loss and the gradient norm jump, and return to normal within a few steps."""

    size: Annotated[Annotated[float, Meta(gt=0, le=100)], "height of the jump, relative to the loss"] = 0.6
    half_life: Annotated[Positive, "steps after which half of the jump remains"] = 4


class NotFinite(Event, frozen=True, kw_only=True):
    """Loss and gradient norm are not finite, so the weights are not updated."""


KINDS: dict[str, type[Event]] = {
    "straggler": Straggler,
    "slowdown": Slowdown,
    "throttle": Throttle,
    "network": Network,
    "lost": Lost,
    "hang": Hang,
    "memory_leak": MemoryLeak,
    "collapse": Collapse,
    "skew": Skew,
    "loss_spike": LossSpike,
    "nan": NotFinite,
}
OF_EXPERTS = (Collapse, Skew)


class Scenario(Struct, frozen=True):
    """The noise and the events of a simulated cluster. `text`: the text of the scenario file, which is copied to the
    run's folder."""

    noise: Noise = Noise()
    events: tuple[Event, ...] = ()
    text: str = ""


def load_scenario(path: str | Path) -> Scenario:
    """Read a scenario from a file, or a shipped scenario by name, such as `straggler`. Raises LayoutError."""
    return scenario_from_toml(read_text(shipped(path, "scenario", SCENARIOS), "scenario"), str(path))


def scenario_from_toml(text: str, where: str = "scenario") -> Scenario:
    """Parse a scenario. Raises LayoutError."""
    tree = parse(text, where)
    unknown = [key for key in tree if key not in ("noise", "events")]
    if unknown:
        raise LayoutError(f"{shown(unknown[0])} is not a key of a scenario; legal: noise, events")
    events = tree.get("events", [])
    if not isinstance(events, list):
        raise LayoutError(f"events = {shown(events)} is not legal; legal: sections [[events]]")
    noise = read_struct(Noise, tree.get("noise", {}), "noise", "a scenario")
    return Scenario(noise, tuple(_event(item, f"events[{n}]") for n, item in enumerate(events)), text)


def _event(item: Any, at: str) -> Event:
    kind = item.get("kind") if isinstance(item, dict) else item
    if not isinstance(kind, str) or kind not in KINDS:
        raise LayoutError(f"{at}.kind = {shown(kind)} is not legal; legal: {', '.join(KINDS)}")
    event: Event = read_struct(KINDS[kind], item, at, f"an event of kind {kind}")
    return event


def check_scenario(scenario: Scenario, layout: Layout, ranks_per_node: int) -> None:
    """Raise LayoutError if an event names a rank, node or experts that the layout does not have."""
    for refusal in _refusals(scenario, layout, ranks_per_node):
        raise LayoutError(refusal)


def _refusals(scenario: Scenario, layout: Layout, ranks_per_node: int) -> Iterator[str]:
    world = layout.ranks.world
    nodes = -(-world // ranks_per_node)
    for n, event in enumerate(scenario.events):
        at = f"events[{n}]"
        if isinstance(event, Straggler | Hang) and event.rank >= world:
            yield f"{at}.rank = {event.rank} is not a rank of this layout; legal: 0 to {world - 1}"
        if isinstance(event, Throttle | Network | Lost) and (event.node or 0) >= nodes:
            nodes_text = f"{nodes} node{'' if nodes == 1 else 's'} of {ranks_per_node} ranks"
            yield f"{at}.node = {event.node} is not one of the {nodes_text}; legal: 0 to {nodes - 1}"
        if isinstance(event, OF_EXPERTS) and not layout.model.moe:
            yield f"{at}.kind = {event.kind} needs experts, and this layout has none; legal: {_of_dense()}"
        if isinstance(event, Collapse) and event.layer is not None and layout.model.moe:
            layers = layout.model.layers_with_experts
            if event.layer not in layers:
                yield f"{at}.layer = {event.layer} has no experts; legal: {layers.start} to {layers[-1]}"


def _of_dense() -> str:
    return ", ".join(kind for kind, event in KINDS.items() if not issubclass(event, OF_EXPERTS))
