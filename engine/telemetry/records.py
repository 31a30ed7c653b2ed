"""What one rank tells of one of its steps: its record, and now and then whom it sent bytes and when its actions ran."""

from agents.protocol import Action, Peers, Step, Timeline, ToPeer, Traffic
from engine.config.layout import Layout
from engine.device import DeviceMemory, matmul_peak
from engine.metering.meter import Readings
from engine.parallel.mesh import World
from engine.planner.hardware import step_flops
from engine.telemetry.step_summary import Known, Measured


class StepRecords:
    """Makes the records of one rank; it holds `layers`, and of the whole model the `head` or not."""

    def __init__(self, layout: Layout, world: World, layers: list[int], head: bool):
        self._layout, self._world, self._layers, self._head = layout, world, layers, head
        self._memory = DeviceMemory(world.device)
        self._peak = matmul_peak(world.device, layout.train.precision)
        self._tokens = layout.local_batch * layout.model.seq_len // layout.ranks.cp

    def step(self, readings: Readings, measured: Measured, known: Known) -> Step:
        idle = measured.idle
        phases = {"forward": readings.busy("F"), "backward": readings.busy("B", "I", "W")} | readings.phases
        dropped = int(readings.dropped.sum())
        return Step(
            rank=self._world.rank,
            step=known.step,
            seq=0,
            revision=known.revision,
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
        """What the model asked for this rank's tokens, over what its device could; over ranks it adds up to the job's.

        Ranks of a tp axis share their tokens and their layers' products. Of experts, those count that its own tokens
        went to, wherever they are: over ranks that is the same.
        """
        if self._peak is None:
            return None
        return self.asked(pairs) / step_s / self._peak

    def asked(self, pairs: int) -> float:
        """FLOPs that the model asks of this rank in a step, where `pairs` of its (token, expert) pairs ran."""
        shared = self._tokens / self._world.tp.size
        return step_flops(self._layout.model, shared, pairs, self._layers, self._head)

    def peers(self, readings: Readings, step: int) -> Peers:
        """All-to-all bytes by the rank they went to."""
        sent = [ToPeer(peer, size) for peer, size in sorted(readings.a2a_to.items())]
        return Peers(self._world.rank, step, sent)

    def timeline(self, readings: Readings, step: int) -> Timeline:
        """Every action of this rank's pipeline."""
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
