"""What one rank measures in one step: phases, collectives by axis, pipeline actions, routing counts.

*Bytes* are those a rank sends to other ranks under a bandwidth-optimal algorithm, P ranks and n bytes in all:
all-reduce 2 (P-1)/P n, reduce-scatter (P-1)/P n, all-gather (P-1) n_local, all-to-all what leaves for others, send n
(Thakur, Rabenseifner and Gropp 2005). The meter only adds up; the formulas are in `engine/parallel/collectives.py`.
A lane's `ms` is from start to completion, its `exposed_ms` what a rank waited: all of it where a collective blocks,
less where it was started early and computation hid it. Actions and collectives are timed by the device's own clock
(`engine/metering/clocks.py`), phases by the wall's: a phase is what the host does.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from engine.device import CPU
from engine.metering.clocks import CLOCKS, Clock, Mark

Kind = Literal["F", "B", "I", "W"]
"""Forward, backward, and its two parts where a schedule runs them apart: input gradients, weight gradients."""

KINDS: tuple[Kind, ...] = get_args(Kind)
DOING: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}

AXES = ("dp", "tp", "pp", "ep", "cp", "control")

Where = Callable[[int, str], None]
"""Told (step, operation) at each operation, so that even a killed rank leaves word of its place."""


@dataclass
class Lane:
    """One axis in one step."""

    bytes: int = 0
    ms: float = 0.0
    exposed_ms: float = 0.0

    def wait(self, seconds: float) -> None:
        """Time of a collective that a rank waited for."""
        self.ms += seconds * 1e3
        self.exposed_ms += seconds * 1e3

    def hide(self, seconds: float) -> None:
        """Time of a collective that ran beside something else: in the total, not exposed."""
        self.ms += seconds * 1e3


@dataclass
class Span:
    """One pipeline action, in seconds since the pipeline window opened."""

    kind: Kind
    stage: int
    micro_batch: int
    start: float = 0.0
    end: float = 0.0


@dataclass
class Readings:
    """One step of one rank."""

    layers: int
    experts: int
    device: torch.device = CPU
    lanes: dict[str, Lane] = field(default_factory=lambda: {axis: Lane() for axis in AXES})
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    spans: list[Span] = field(default_factory=list)
    waited: float = 0.0  # seconds asleep between actions: on a pipeline neighbour
    a2a_to: dict[int, int] = field(default_factory=dict)  # rank of the world -> all-to-all bytes sent to it
    load: Tensor = field(init=False)  # [layer, expert], (token, expert) pairs routed from this rank's tokens
    dropped: Tensor = field(init=False)  # [layer], of those the pairs over capacity

    def __post_init__(self) -> None:
        self.load = torch.zeros(self.layers, self.experts, dtype=torch.int64, device=self.device)
        self.dropped = torch.zeros(self.layers, dtype=torch.int64, device=self.device)

    def settle(self) -> None:
        """Bring the counts to the host. Waits for the device, so it is for when somebody has done so anyway."""
        self.load, self.dropped = self.load.cpu(), self.dropped.cpu()

    def wait(self, seconds: float) -> None:
        """Time between actions that a rank waited for its pipeline neighbours."""
        self.waited += seconds
        self.lanes["pp"].wait(seconds)

    @property
    def a2a_bytes(self) -> int:
        return sum(self.a2a_to.values())

    def busy(self, *kinds: Kind) -> float:
        """Seconds in actions, of `kinds` if any are given."""
        return sum(span.end - span.start for span in self.spans if not kinds or span.kind in kinds)

    @property
    def window(self) -> float:
        """Seconds from the pipeline's opening to the end of its last action."""
        return max((span.end for span in self.spans), default=0.0)


class Meter:
    """Adds up what a rank does. Cheap enough to be always on; `start_step` begins anew."""

    def __init__(
        self, layers: int = 0, experts: int = 0, where: Where | None = None, device: torch.device = CPU
    ):
        self.layers, self.experts, self.device = layers, experts, device
        self.step = 0
        self.clock = CLOCKS[device.type]()
        self.readings = Readings(layers, experts, device)
        self._where = where
        self._doing = ("starting", time.monotonic())
        self._holding = ""
        self.layer: int | None = None
        self._micro_batch: int | None = None
        self._opened: Mark = None
        self._resting: Mark = None  # since when this rank has waited for its pipeline; None: it does not

    @property
    def doing(self) -> tuple[int, str, float]:
        """(step, operation, time.monotonic() since when): read by the pulse thread."""
        text, since = self._doing
        return self.step, self._holding or text, since

    def at(self, text: str) -> None:
        self._doing = (text, time.monotonic())
        if self._where:
            self._where(self.step, text)

    def start_step(self, step: int) -> None:
        self.step = step
        self.clock.start_step()
        self.readings = Readings(self.layers, self.experts, self.device)

    def settle(self) -> None:
        """Once the host has waited for the device anyway: bring counts to the host, and take times that are known."""
        self.readings.settle()
        self.clock.collect()

    @contextmanager
    def holding(self, text: str) -> Iterator[None]:
        """While this rank holds still: `text` is what it does, whichever collective it listens in."""
        self._holding = text
        yield
        self._holding = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.at(name)
        start = time.perf_counter()
        yield
        phases = self.readings.phases
        phases[name] = phases.get(name, 0.0) + time.perf_counter() - start

    @contextmanager
    def in_layer(self, layer: int | None) -> Iterator[None]:
        outside, self.layer = self.layer, layer
        try:
            yield
        finally:  # a recomputed forward is cut short by an exception once it has what backward needs
            self.layer = outside

    # --------------------------------------------------------------------------------------- collectives

    @contextmanager
    def collective(
        self,
        axis: str,
        kind: str,
        sent_bytes: int,
        to: Mapping[int, int] | None = None,
        clock: Clock | None = None,
    ) -> Iterator[None]:
        """Around each collective: `sent_bytes` leave this rank for others; of an all-to-all, `to` whom. `clock` is the
        device's if left out."""
        clock = clock or self.clock
        text = f"{axis} {kind}"
        if self.layer is not None:
            text += f", layer {self.layer}"
        if self._micro_batch is not None:
            text += f", micro-batch {self._micro_batch}"
        before = self._doing[0]
        self.at(text)
        resting = self._wake()  # it waits for others now, not for the pipeline
        start = clock.mark()
        yield
        lane = self.readings.lanes[axis]
        lane.bytes += sent_bytes
        clock.between(start, clock.mark(), lane.wait)
        if resting:
            self._resting = self.clock.rest()
        for peer, sent in (to or {}).items():
            self.readings.a2a_to[peer] = self.readings.a2a_to.get(peer, 0) + sent
        self.at(before)

    def sent(self, axis: str, sent_bytes: int) -> None:
        """Bytes of a send that the pipeline's schedule waits for elsewhere."""
        self.readings.lanes[axis].bytes += sent_bytes

    # ------------------------------------------------------------------------------------------ pipeline

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """The window in which a step's micro-batches run, up to its last action; time in it outside actions is idle."""
        self._opened, self._resting = self.clock.mark(), self.clock.rest()
        yield
        self._resting = None  # it may be early, but does not wait here

    @contextmanager
    def action(self, kind: Kind, stage: int, micro_batch: int) -> Iterator[None]:
        self._micro_batch = micro_batch
        self.at(f"{DOING[kind]}, micro-batch {micro_batch}")
        self._wake()
        clock, span = self.clock, Span(kind, stage, micro_batch)
        clock.between(self._opened, clock.mark(), partial(setattr, span, "start"))
        yield
        clock.between(self._opened, clock.mark(), partial(setattr, span, "end"))
        self._resting = clock.rest()
        self.readings.spans.append(span)
        self._micro_batch = None

    @contextmanager
    def action_goes_on(self) -> Iterator[None]:
        """What the schedule does outside the action it belongs to: the loss after the last stage's forward."""
        self.at("loss")
        self._resting = None
        yield
        self._resting = self.clock.rest()
        span = self.readings.spans[-1]
        self.clock.between(self._opened, self.clock.mark(), partial(setattr, span, "end"))

    def _wake(self) -> bool:
        """End a wait for the pipeline, if this is one."""
        if self._resting is None:
            return False
        self.clock.between(self._resting, self.clock.rest(), self.readings.wait)
        self._resting = None
        return True

    # ------------------------------------------------------------------------------------------- routing

    def routed(self, layer: int, load_E: Tensor, dropped: Tensor) -> None:
        """Count one micro-batch's routing at `layer`; called once per logical forward."""
        self.readings.load[layer] += load_E
        self.readings.dropped[layer] += dropped
