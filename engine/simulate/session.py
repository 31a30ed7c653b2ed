"""Runs a simulation in real time: paces the steps, sends the messages of all ranks to the hub in place of their agents,
and carries out commands."""

import time
from collections.abc import Callable, Iterator

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from agents.protocol import PAUSED, Event, Facts, Gone, Message, Summary, clip
from agents.rank.many_ranks import ManyRanks
from engine.config.layout import Layout
from engine.control.preview.previewer import Previewer
from engine.simulate.simulator import Simulated, Simulator
from engine.simulate.steering import Steering
from engine.simulate.telemetry.packing import frames
from engine.simulate.telemetry.records import LEADER, Operation, Records
from engine.telemetry.expert_load import experts_message, loads_message

PULSE_S = 1.0
VECTORS_EVERY_S = 0.25  # minimum time between two samples, even if steps are faster
PEERS_PER_S = 512  # maximum all-to-all records per second, the rate that a hub requests
NOTED_EVERY_S = 0.5
WAIT_S = 0.1  # maximum time to wait for the hub in one turn
MOST_QUEUED = 64  # maximum number of queued frames: at maximum speed, a run waits until the hub has read them
PATIENCE_S = 5.0  # maximum time to wait for a hub that does not read; after this time, records are dropped

OPERATIONS = {
    "F": "forward",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
}


class Session:
    """One simulated run. `speed`: simulated seconds per real second; None: as fast as possible. `should_stop` returns
    whether the run must stop, and is called repeatedly. `lost_output` is called after each step; the sentence that it
    returns becomes a warning in the run's log. `started`: how the run was started, as names and values that
    clients display."""

    def __init__(
        self,
        layout: Layout,
        simulator: Simulator,
        ranks: ManyRanks,
        speed: float | None,
        should_stop: Callable[[], bool],
        on_summary: Callable[[Summary], None],
        lost_output: Callable[[], str | None],
        started: Facts,
    ):
        self._layout, self._simulator, self._ranks, self._speed = layout, simulator, ranks, speed
        self._should_stop, self._on_summary, self._lost_output = should_stop, on_summary, lost_output
        self._began_s = time.time()
        self.steering = Steering(layout, simulator, ranks)
        self.records = Records(simulator, speed, started)
        self._previewer = Previewer(layout, self.steering.board, False, simulator.hardware)
        ranks.preview = self._previewer
        self._pulsed_s = self._vectors_s = self._peers_s = self._noted_s = 0.0
        self._silent = np.zeros(simulator.cluster.world, dtype=bool)

    def run(self) -> None:
        """Simulate until the last step, or until an operator or a signal stops the run."""
        board, ranks = self.steering.board, self._ranks
        ranks.introduce(self.records.hellos(board, 0, self._began_s), self.records.board(board))
        ranks.send([Event(time.time(), "warning", f"rank {LEADER}", self._notice())])
        for step in range(self._layout.train.steps):
            found = self._simulator.step(step, board.revision, board.values, time.time())
            if self._await_end_of(found):
                break
            last = step + 1 == self._layout.train.steps
            if not last and not self._should_stop():
                self.steering.take_command(step, self.records, self._began_s)
            self._report(found)
            if self.steering.run_actions.stopping or self._hold(found):
                break
        self.steering.expire_pending(self._layout.train.steps)
        ranks.send(
            Gone(rank, clean=True) for rank in range(self._simulator.cluster.world) if not self._silent[rank]
        )
        ranks.close()

    def _notice(self) -> str:
        speed = "as fast as possible" if self._speed is None else f"{self._speed:g} times real time"
        world, hardware = self._simulator.cluster.world, self._simulator.hardware.name
        return f"this run is simulated: {world} ranks of {hardware}, at {speed}; nothing is trained"

    # ---------------------------------------------------------------------------------------------- time

    def _await_end_of(self, found: Simulated) -> bool:
        """Wait until the step ends on the simulated clock. Meanwhile, send the hub each rank's heartbeat (the message
        `Pulse`) once a second. Returns whether the run must stop."""
        conditions = found.conditions
        if (conditions.silent | conditions.hung).any() and self._speed is not None:
            return self._await_outage(found)
        began = time.monotonic()
        length_s = found.times.step_s / self._speed if self._speed else 0.0
        while True:
            elapsed = time.monotonic() - began
            self._pulse(found, elapsed * (self._speed or 0.0))
            self._ranks.turn(min(WAIT_S, max(0.0, length_s - elapsed)))
            if self._should_stop():
                return True
            if time.monotonic() - began >= length_s:
                return not self._speed and self._hub_is_behind()

    def _hub_is_behind(self) -> bool:
        """Wait until at most `MOST_QUEUED` frames are queued for the hub. Returns whether the run must stop."""
        until = time.monotonic() + PATIENCE_S
        while self._ranks.queued > MOST_QUEUED and time.monotonic() < until:
            self._ranks.turn(WAIT_S)
            if self._should_stop():
                return True
        return False

    def _await_outage(self, found: Simulated) -> bool:
        """Simulate an outage: some ranks send nothing or hang, and all others wait for them. Returns whether the run
        must stop."""
        conditions, began = found.conditions, time.monotonic()
        assert self._speed is not None
        self._silent = conditions.silent
        self._ranks.silence(np.flatnonzero(self._silent).tolist())
        length_s = None if conditions.outage_s is None else conditions.outage_s / self._speed
        while length_s is None or time.monotonic() - began < length_s:
            waited_ms = (time.monotonic() - began) * 1e3
            self._send_pulses(found, outage(found, waited_ms))
            self._ranks.turn(WAIT_S)
            if self._should_stop():
                return True
        self._silent = np.zeros_like(self._silent)
        self._ranks.silence([])
        return False

    def _hold(self, found: Simulated) -> bool:
        """Wait while the run is paused. Returns whether the run must stop."""
        actions, began = self.steering.run_actions, time.monotonic()
        everyone = np.arange(self._simulator.cluster.world)
        while actions.paused and not actions.stopping:
            self._send_pulses(found, [Operation(everyone, PAUSED, (time.monotonic() - began) * 1e3)])
            self._ranks.turn(WAIT_S)
            if self._should_stop():
                return True
            self.steering.take_command(found.step, self.records, self._began_s)
        return actions.stopping

    # --------------------------------------------------------------------------------------------- pulses

    def _pulse(self, found: Simulated, at_s: float) -> None:
        if time.monotonic() - self._pulsed_s >= PULSE_S:
            self._send_pulses(found, list(self._operations(found, at_s)))
            self._send_rows(self.records.vitals(found, self._silent))

    def _send_pulses(self, found: Simulated, operations: list[Operation]) -> None:
        if time.monotonic() - self._pulsed_s >= PULSE_S:
            self._pulsed_s = time.monotonic()
            self._send_rows(self.records.pulses(found.step, operations))

    def _operations(self, found: Simulated, at_s: float) -> Iterator[Operation]:
        """Yield, for each pipeline rank, the operation that is running `at_s` seconds after the start of the step, and
        how long it has been running."""
        cluster, times = self._simulator.cluster, found.times
        clock = self._simulator.clock.predicted(found.job).clock
        for pp, acts in enumerate(clock.acts):
            ranks = np.flatnonzero((cluster.pp == pp) & ~self._silent)
            place = int(np.searchsorted(times.ends[pp], at_s, side="right"))
            if place < len(acts):
                act, start = acts[place], float(times.starts[pp][place])
                doing = f"{OPERATIONS[act.kind]}, micro-batch {act.micro_batch}"
                if at_s < start:
                    doing, start = (
                        "waiting for a pipeline stage",
                        float(times.ends[pp][place - 1]) if place else 0.0,
                    )
            else:
                done = float(times.ends[pp][-1])
                reducing = at_s < times.step_s - times.optimizer
                doing, start = (
                    ("dp reduce", done) if reducing else ("optimizer", times.step_s - times.optimizer)
                )
            yield Operation(ranks, doing, max(0.0, at_s - start) * 1e3)

    def _send_rows(self, packed: Iterator[NDArray[np.uint8]]) -> None:
        if self._ranks.attached:
            for rows in packed:
                for frame in frames(rows):
                    self._ranks.send_frame(frame)

    # ---------------------------------------------------------------------------------------------- steps

    def _report(self, found: Simulated) -> None:
        """Send the records of the step and its summary; in sampled steps, also the load of every expert, the pipeline
        timelines and the all-to-all bytes by destination."""
        step, summary, ranks = found.step, found.summary, self._ranks
        if ranks.attached:
            self._send_rows(iter([self.records.steps(found, summary.revision)]))
            messages: list[Message] = [summary]
            if found.routed:
                messages.append(loads_message(step, found.routed.load, found.routed.dropped))
            ranks.send([*messages, *self._vectors(found), *self._events(found)])
            self._note(found)
        self._on_summary(summary)

    def _note(self, found: Simulated) -> None:
        """Pass the step to the previewer, and once every `NOTED_EVERY_S` seconds also rank 0's memory use and the
        durations of its pipeline actions."""
        self._previewer.note(found.summary, found.routed.load.tolist() if found.routed else ())
        self._ranks.send(self._previewer.take_events())
        now, piped = time.monotonic(), self._layout.grid.pp > 1
        if now - self._noted_s < NOTED_EVERY_S:
            return
        self._noted_s = now
        times = found.times
        durations = [(end - start).tolist() for end, start in zip(times.ends, times.starts, strict=True)]
        clock = self._simulator.clock.predicted(found.job).clock
        self._previewer.note_rank(int(found.memory[LEADER]), clock, durations if piped else None)

    def _vectors(self, found: Simulated) -> Iterator[Message]:
        now, step, ranks = time.monotonic(), found.step, self._ranks
        experts, timeline = ranks.wants("experts", step), ranks.wants("timeline", step)
        yield from self._peers(found, now)
        if now - self._vectors_s < VECTORS_EVERY_S or not (experts or timeline):
            return
        self._vectors_s = now
        if experts and found.routed:
            yield experts_message(step, found.routed.load, found.routed.dropped)
        if timeline and self._layout.grid.pp > 1:
            yield from self.records.timelines(found)

    def _peers(self, found: Simulated, now: float) -> Iterator[Message]:
        """The all-to-all bytes by destination, for the ranks that must send a `Peers` message for this step. However
        short the steps are, the ranks send at most `PEERS_PER_S` of these messages per second."""
        ranks = self._ranks.peers_wanted(found.step)
        if ranks and now - self._peers_s >= max(VECTORS_EVERY_S, len(ranks) / PEERS_PER_S):
            self._peers_s = now
            yield from self.records.peers(found, ranks)

    def _events(self, found: Simulated) -> Iterator[Event]:
        if lost := self._lost_output():
            yield Event(time.time(), "warning", f"rank {LEADER}", clip(lost))
        if found.summary.skipped:
            norm = found.summary.grad_norm
            text = f"step {found.step}: the gradient norm is {norm}, so the weights stay unchanged"
            yield Event(time.time(), "error", f"rank {LEADER}", text)
        if found.routed and (placed := self.steering.place_experts(found.routed.load)):
            board = self.steering.board
            # The ranks introduce themselves again, because hellos contain the experts of each rank.
            hellos = self.records.hellos(board, found.step + 1, self._began_s)
            self._ranks.introduce(hellos, self.records.board(board))
            yield structs.replace(placed, source=f"rank {LEADER}")


def outage(found: Simulated, waited_ms: float) -> list[Operation]:
    """The operations that the ranks report during a hang: the hung rank is in a forward pass, and the others wait for
    it in a collective."""
    conditions = found.conditions
    waiting = np.flatnonzero(~conditions.silent & ~conditions.hung)
    doing = "ep all-to-all" if found.traffic else "dp reduce"
    hung = Operation(np.flatnonzero(conditions.hung), "forward, micro-batch 0", waited_ms)
    return [Operation(waiting, doing, waited_ms), hung]
