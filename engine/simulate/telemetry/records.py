"""The messages of a simulated step, packed for all ranks at once."""

import socket
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agents.protocol import (
    VERSION,
    Action,
    Board,
    Facts,
    Hello,
    Message,
    Peers,
    Pulse,
    Step,
    Timeline,
    ToPeer,
    Traffic,
    Value,
    Vitals,
)
from agents.protocol.held_experts import held_facts
from agents.rank.knob_board import KnobBoard
from agents.rank.sampling import CAPABILITIES
from engine.metering.axes import AXES
from engine.planner.expert_placement import experts_of
from engine.planner.idle_time import Idle
from engine.simulate.simulator import Simulated, Simulator
from engine.simulate.telemetry.packing import Marks, Template
from engine.telemetry.layout_facts import layout_facts

LEADER = 0
THROTTLED = ["thermal"]


class Operation(NamedTuple):
    """An operation that the ranks `ranks` are running; `since_ms`: the milliseconds since the operation began."""

    ranks: NDArray[np.int64]
    doing: str
    since_ms: float


def _pulse_of(step: int, doing: str, marks: Marks) -> Pulse:
    return Pulse(marks.count("rank"), step, doing, marks.real("since"))


class Records:
    """Makes the messages of all simulated ranks."""

    def __init__(self, simulator: Simulator, speed: float | None, started: Facts | None = None):
        self._simulator, self._speed, self._started = simulator, speed, started or {}
        self._cluster, self._layout = simulator.cluster, simulator.layout
        self._piped = self._cluster.grid.pp > 1
        self._step = Template(self._step_of)
        self._vitals = [Template(partial(self._vitals_of, reasons)) for reasons in ([], THROTTLED)]

    # ------------------------------------------------------------------------------------- introduction

    def hellos(self, board: KnobBoard, step: int, began_s: float) -> Iterator[Hello]:
        """The `Hello` message that every rank would send at `step`."""
        layout, cluster = self._layout, self._cluster
        facts: dict[str, Value] = layout_facts(layout) | {
            "data": "simulated",
            "checkpoint_every": 0,  # a simulated run has nothing to save
            "hardware": self._simulator.hardware.name,
            "speed": "max" if self._speed is None else self._speed,
            "simulated_on": socket.gethostname(),
        }
        held = self._held()
        digest = layout.digest()
        for rank in range(cluster.world):
            yield Hello(
                version=VERSION,
                run=layout.run.name,
                rank=rank,
                world=cluster.world,
                coords=cluster.grid.shown(rank),
                host=cluster.host(rank),
                pid=1000 + rank % cluster.ranks_per_node,
                device=f"cuda:{rank % cluster.ranks_per_node} {self._simulator.hardware.name}",
                layout=digest,
                revision=board.revision,
                step=step,
                leader=rank == LEADER,
                facts=facts
                | (self._started if rank == LEADER else {})
                | held[int(cluster.pp[rank]), int(cluster.ep[rank])],
                capabilities=list(CAPABILITIES),
                began_s=began_s,
                simulated=True,
            )

    def _held(self) -> dict[tuple[int, int], dict[str, Value]]:
        """For each pair of pp and ep coordinates, the part of a `Hello` message that lists the experts of a rank with
        these coordinates."""
        grid, router = self._cluster.grid, self._simulator.router
        placement = router.placement if router else {}
        return {
            (pp, ep): held_facts(
                {
                    layer: experts_of(placement[layer], grid.ep, ep)
                    for layer in self._simulator.layers_of(pp)
                    if layer in placement
                }
            )
            for pp in range(grid.pp)
            for ep in range(grid.ep)
        }

    def board(self, board: KnobBoard) -> Board:
        """The message in which the leader reports all knobs and their values."""
        return Board(LEADER, board.revision, board.digest(), board.states())

    # --------------------------------------------------------------------------------------------- steps

    def _step_of(self, marks: Marks) -> Step:
        count, real = marks.count, marks.real
        return Step(
            rank=count("rank"),
            step=count("step"),
            seq=count("seq"),
            revision=count("revision"),
            step_ms=real("step_ms"),
            phases={phase: real(phase) for phase in ("forward", "backward", "reduce", "optimizer")},
            tokens=count("tokens"),
            comm={
                axis: Traffic(count(f"{axis}.bytes"), real(f"{axis}.ms"), real(f"{axis}.exposed"))
                for axis in AXES
            },
            a2a_bytes=count("a2a_bytes"),
            bubble=real("bubble") if self._piped else None,
            bubble_bound=real("bound") if self._piped else None,
            dropped=count("dropped"),
            memory_bytes=count("memory"),
            bubble_parts={part: real(part) for part in Idle.PARTS} if self._piped else None,
            tokens_per_s=real("tokens_per_s"),
            mfu=real("mfu"),
        )

    def steps(self, found: Simulated, revision: int) -> NDArray[np.uint8]:
        """The packed step record of every rank."""
        times, step_s = found.times, found.times.step_s
        columns: dict[str, Any] = {
            "rank": np.arange(self._cluster.world),
            "step": found.step,
            "seq": found.step + 1,
            "revision": revision,
            "step_ms": step_s * 1e3,
            "forward": times.forward * 1e3,
            "backward": times.backward * 1e3,
            "reduce": times.reduce * 1e3,
            "optimizer": times.optimizer * 1e3,
            "tokens": found.tokens,
            "a2a_bytes": found.a2a_bytes,
            "bubble": times.bubble,
            "bound": times.bound,
            "schedule": times.schedule,
            "wait": times.bubble - times.schedule,
            "overhead": 0.0,
            "dropped": found.dropped,
            "memory": found.memory,
            "tokens_per_s": found.tokens / step_s,
            "mfu": found.mfu,
        }
        for axis in AXES:
            columns[f"{axis}.bytes"] = found.bytes[axis]
            waited = times.exposed.get(axis, np.zeros(1)) * 1e3
            columns[f"{axis}.exposed"] = waited
            columns[f"{axis}.ms"] = times.collectives[axis] * 1e3 if axis in times.collectives else waited
        return self._step.pack(columns)

    def timelines(self, found: Simulated) -> Iterator[Timeline]:
        """The pipeline actions (forward and backward passes of micro-batches) of the step, for one rank per pp
        coordinate."""
        clock = self._simulator.clock.predicted(found.job).clock
        times = found.times
        for rank, acts, starts, ends in zip(
            self._cluster.senders.tolist(), clock.acts, times.starts, times.ends, strict=True
        ):
            actions = [
                Action("B" if act.kind == "I" else act.kind, act.micro_batch, start, end, act.stage)  # type: ignore[arg-type]
                for act, start, end in zip(acts, (starts * 1e3).tolist(), (ends * 1e3).tolist(), strict=True)
            ]
            yield Timeline(rank, found.step, float(times.window[rank]) * 1e3, actions)

    def peers(self, found: Simulated, ranks: Iterable[int]) -> Iterator[Message]:
        """For each of `ranks`, a message with the all-to-all bytes that the rank sends to each destination rank."""
        cluster = self._cluster
        for rank in ranks if found.traffic else ():
            sent = found.traffic[int(cluster.pp[rank])].sent[int(cluster.ep[rank])].tolist()
            group = cluster.ep_groups[rank].tolist()
            to = [ToPeer(peer, size) for peer, size in zip(group, sent, strict=True) if size]
            yield Peers(rank, found.step, to)

    # ---------------------------------------------------------------------------------------- every second

    def pulses(self, step: int, operations: Iterable[Operation]) -> Iterator[NDArray[np.uint8]]:
        """For each of `operations`, an array of packed pulse messages: one for each rank that runs the operation."""
        for operation in operations:
            if len(operation.ranks):
                template = Template(partial(_pulse_of, step, operation.doing))
                yield template.pack({"rank": operation.ranks, "since": operation.since_ms})

    def _vitals_of(self, reasons: list[str], marks: Marks) -> Vitals:
        return Vitals(
            marks.count("rank"),
            marks.count("step"),
            device_percent=marks.real("percent"),
            device_memory_bytes=marks.count("memory"),
            device_memory_total=int(self._simulator.hardware.device.memory_bytes),
            throttle=reasons,
        )

    def vitals(self, found: Simulated, silent: NDArray[np.bool_]) -> Iterator[NDArray[np.uint8]]:
        """The packed vital signs of the ranks that are not silent: device utilisation, memory in use, and the reason
        for throttled clocks."""
        waits = sum(found.times.exposed.values())
        percent = 100.0 * (1.0 - np.clip(waits / found.times.step_s, 0.0, 1.0))
        for throttled, template in enumerate(self._vitals):
            (ranks,) = np.nonzero((found.conditions.throttled == throttled) & ~silent)
            if len(ranks):
                columns = {
                    "rank": ranks,
                    "step": found.step,
                    "percent": percent[ranks],
                    "memory": found.memory[ranks],
                }
                yield template.pack(columns)
