"""Creates the records of one rank's steps and, for sampled steps, the bytes sent to each peer and the times of pipeline
actions."""

from agents.protocol import Action, Peers, Step, Timeline, ToPeer, Traffic
from engine.config.layout import Layout
from engine.device import DeviceMemory, matmul_peak
from engine.metering.meter import Readings
from engine.model.interface import model_flops
from engine.parallel.mesh import World
from engine.telemetry.step_summary import Measured, StepConditions


class StepRecords:
    """Creates the step records of one rank. The rank holds the layers with the indices `layers` and, if `head` is True,
    the output head."""

    def __init__(self, layout: Layout, world: World, layers: list[int], head: bool):
        self._layout, self._world, self._layers, self._head = layout, world, layers, head
        self._memory = DeviceMemory(world.device)
        self._peak = matmul_peak(world.device, layout.train.precision)
        self._tokens = layout.local_batch * layout.model.seq_len // layout.ranks.cp

    def step(self, readings: Readings, measured: Measured, conditions: StepConditions) -> Step:
        idle = measured.idle
        phases = {"forward": readings.busy("F"), "backward": readings.busy("B", "I", "W")} | readings.phases
        dropped = int(readings.dropped.sum())
        return Step(
            rank=self._world.rank,
            step=conditions.step,
            seq=0,
            revision=conditions.revision,
            step_ms=measured.step_s * 1e3,
            phases={name: seconds * 1e3 for name, seconds in phases.items()},
            tokens=self._tokens,
            comm={
                axis: Traffic(lane.bytes, lane.ms, lane.exposed_ms) for axis, lane in readings.lanes.items()
            },
            a2a_bytes=readings.a2a_bytes,
            bubble=idle.bubble if idle else None,
            bubble_bound=idle.bound if idle else None,
            dropped=dropped,
            memory_bytes=self._memory(),
            bubble_parts=idle.parts if idle else None,
            tokens_per_s=self._tokens / measured.step_s,
            mfu=self._mfu(measured.step_s, int(readings.load.sum()) - dropped),
        )

    def _mfu(self, step_s: float, pairs: int) -> float | None:
        """Model FLOPs utilisation: model FLOP/s for this rank's tokens, divided by the peak of its device.

        The FLOPs of all ranks add up to those of the whole job: each rank of a tp group counts an equal share of the
        group's tokens, and a (token, expert) pair is counted on the rank of its token.
        """
        if self._peak is None:
            return None
        flops = self.model_flops(pairs)
        return None if flops is None else flops / step_s / self._peak

    def model_flops(self, pairs: int) -> float | None:
        """This rank's model FLOPs in a step in which experts processed `pairs` of its (token, expert) pairs; None if
        the model's implementation does not declare its multiply-adds."""
        shared = self._tokens / self._world.tp.size
        return model_flops(self._layout.model, shared, pairs, self._layers, self._head)

    def peers(self, readings: Readings, step: int) -> Peers:
        """All-to-all bytes by destination rank."""
        sent = [ToPeer(peer, size) for peer, size in sorted(readings.a2a_to.items())]
        return Peers(self._world.rank, step, sent)

    def timeline(self, readings: Readings, step: int) -> Timeline:
        """Start and end times of this rank's pipeline actions in a step."""
        actions = [
            Action(
                "B" if span.kind == "I" else span.kind,
                span.micro_batch,
                span.start * 1e3,
                span.end * 1e3,
                span.stage,
            )
            for span in readings.spans
        ]
        return Timeline(self._world.rank, step, readings.window * 1e3, actions)
