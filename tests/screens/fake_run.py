"""A scripted run for the tests of the screens. Each update is a pure function of the grid and the step, so that every
test run draws the same screens.

`begin` yields the updates that a new client receives first, and `step` yields the updates of one step.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from agents.protocol import (
    PREVIEWS,
    Action,
    Alert,
    Board,
    CommandState,
    Event,
    Experts,
    Hello,
    KnobState,
    LayerLoad,
    Legal,
    Peers,
    Pulse,
    Step,
    Summary,
    Timeline,
    ToPeer,
    Traffic,
    TrialState,
    Update,
    Value,
)
from agents.protocol.held_experts import held_facts

START_S = 1_700_000_000.0
AXES = ("tp", "ep", "pp", "dp", "control")


@dataclass
class FakeRun:
    """The grid of a fake run, the values of its knobs, and the methods that create its updates."""

    pp: int = 2
    dp: int = 2
    tp: int = 2
    ep: int = 4
    layers: int = 4
    experts: int = 8
    steps: int = 300
    oversubscribed: bool = True
    slow_rank: int | None = 3
    spike: tuple[int, int] | None = None  # a step, and the rank that takes 300 ms longer in it
    straggler_alert: bool = False  # whether the hub alerts on the slow rank after a few steps
    revision: int = 0
    node_ranks: int | None = None  # ranks of each host; None: all are on one
    # the rank that receives three times the all-to-all bytes of others in its ep group
    hot_peer: int | None = None
    previews: bool = True  # whether the leader rank answers preview queries
    # (layer, expert) -> first step without tokens
    dead: dict[tuple[int, int], int] = field(default_factory=dict)
    # (layer, expert) -> first step of a high load
    hot: dict[tuple[int, int], int] = field(default_factory=dict)
    knobs: dict[str, Value] = field(
        default_factory=lambda: {
            "micro_batches": 4,
            "capacity_factor": None,
            "recompute": "none",
            "lr_scale": 1.0,
        }
    )

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp

    def coords(self, rank: int) -> dict[str, int]:
        pp, rest = divmod(rank, self.dp * self.tp)
        dp, tp = divmod(rest, self.tp)
        return {"pp": pp, "dp": dp, "tp": tp, "ep": rest % self.ep}

    def begin(self) -> Iterator[Update]:
        facts: dict[str, Value] = {
            "name": "demo",
            "layers": self.layers,
            "experts": self.experts,
            "params": 1_930_000,
            "cores": 2 if self.oversubscribed else self.world,
            "oversubscribed": self.oversubscribed,
            "schedule": "1f1b",
            "steps": self.steps,
            "seq_len": 128,
            "global_batch": 32,
        }
        for rank in range(self.world):
            yield Hello(
                version=1,
                run="demo-0001",
                rank=rank,
                world=self.world,
                coords=self.coords(rank),
                host=f"node{rank // self.node_ranks if self.node_ranks else 0}",
                pid=4000 + rank,
                device="cpu",
                layout="d1ge57",
                revision=self.revision,
                step=0,
                leader=rank == 0,
                facts=facts | held_facts(self.held(rank)),
                capabilities=[PREVIEWS] if self.previews and rank == 0 else [],
            )
        yield self.board()
        yield Event(START_S, "info", "hub", f"{self.world} ranks joined")

    def held(self, rank: int) -> dict[int, range]:
        """The experts that a rank holds, by layer. Each stage has consecutive layers, and each ep rank consecutive
        experts."""
        at = self.coords(rank)
        each, layers = self.experts // self.ep, -(-self.layers // self.pp)
        of_stage = range(at["pp"] * layers, min(self.layers, (at["pp"] + 1) * layers))
        return {layer: range(at["ep"] * each, (at["ep"] + 1) * each) for layer in of_stage}

    def board(self) -> Board:
        legal = {
            "micro_batches": (Legal([2, 4, 8, 16]), True, "pieces the batch is cut into for the pipeline"),
            "capacity_factor": (
                Legal(low=0.1, high=8.0, optional=True),
                False,
                "tokens an expert may take, over its fair share; none drops nothing",
            ),
            "recompute": (Legal(["none", "selective", "full"]), True, "activations rebuilt in backward"),
            "lr_scale": (Legal(low=0.0, high=10.0), False, "multiplies the scheduled learning rate"),
        }
        rows = [
            KnobState(name, self.knobs[name], *legal[name][:2], about=legal[name][2]) for name in self.knobs
        ]
        return Board(0, self.revision, f"digest{self.revision}", rows)

    def step_ms(self, step: int) -> float:
        return (412.0 if self.knobs["micro_batches"] == 4 else 655.0) + 14 * wave(step, 1)

    def step(self, step: int) -> Iterator[Update]:
        """All updates of one step."""
        spike_ms = 300.0 if self.spike and self.spike[0] == step else 0.0
        base = self.step_ms(step) + spike_ms
        for rank in range(self.world):
            yield self._rank_step(rank, step, base)
            if step % 2 == 0:
                yield Pulse(rank, step, "backward, micro-batch 2", 12.0, 97.0)
        if step % 4 == 0 or spike_ms:
            stages = range(0, self.world, self.dp * self.tp)
            yield from (self._timeline(rank, stage, step) for stage, rank in enumerate(stages))
        if step % 20 == 8 and self.ep > 1:
            yield from (self._peers(rank, step) for rank in range(self.world))
        load = [self._load(layer, step) for layer in range(self.layers)]
        yield Experts(step, load)
        if step == 3 and self.straggler_alert and self.slow_rank is not None:
            yield self._straggler(self.slow_rank, step)
        yield self._summary(step, base, load)

    def _straggler(self, rank: int, step: int) -> Alert:
        at = " ".join(f"{axis}{place}" for axis, place in self.coords(rank).items())
        text = (
            f"rank {rank} ({at}) has an own time of 358 ms a step, +37 % against the ranks with the same work"
        )
        return Alert("straggler", f"rank {rank}", "warning", True, step, START_S, text, {}, [rank])

    def _rank_step(self, rank: int, step: int, base: float) -> Step:
        slow = 1.42 if rank == self.slow_rank else 1.0
        waits = 54.0 if rank == self.slow_rank else 150.0  # the other ranks wait for the slow rank
        spike_ms = 0.0
        if self.spike and self.spike[0] == step:
            spike_ms, waits = (300.0, waits) if rank == self.spike[1] else (0.0, waits + 300.0)
        last = self.coords(rank)["pp"] == self.pp - 1
        return Step(
            rank=rank,
            step=step,
            seq=step,
            revision=self.revision,
            step_ms=base + 3 * wave(step, rank),
            phases={
                "forward": (118 + 6 * last + 2 * wave(step, rank)) * slow,
                "backward": (203 + 9 * last + 3 * wave(step, rank + 7)) * slow + spike_ms,
                "optimizer": 21.0,
            },
            tokens=32 * 128 // self.dp,
            comm=self._comm(step, 1) | {"tp": Traffic(262_000, waits, waits)},
            a2a_bytes=524_288 if self.ep > 1 else 0,
            bubble=0.214 + 0.01 * wave(step, rank),
            bubble_bound=0.2,
            bubble_parts={"schedule": 0.201, "wait": 0.013 + 0.01 * wave(step, rank), "overhead": 0.0},
            dropped=0,
            memory_bytes=(310 + 24 * last + rank % 3) << 20,
        )

    def _comm(self, step: int, ranks: int) -> dict[str, Traffic]:
        size = {"tp": 262_000, "ep": 524_288, "pp": 125_000, "dp": 201_000, "control": 16}
        spent = {
            "tp": (38.0, 38.0),
            "ep": (21.0, 21.0),
            "pp": (9.0, 9.0),
            "dp": (14.0, 2.0),
            "control": (0.1, 0.0),
        }
        return {
            axis: Traffic(0, 0.0, 0.0)
            if axis == "ep" and self.ep == 1
            else Traffic(size[axis] * ranks, spent[axis][0] * (1 + 0.05 * abs(wave(step, i))), spent[axis][1])
            for i, axis in enumerate(AXES)
        }

    def _timeline(self, rank: int, stage: int, step: int) -> Timeline:
        micro = self.knobs["micro_batches"]
        assert isinstance(micro, int)
        order = one_f_one_b(self.pp, micro)[stage]
        window = max(end for line in one_f_one_b(self.pp, micro) for *_, end in line)
        scale, late = 320.0 / window, 0.0
        actions = []
        for kind, mb, start, end in order:
            begin = start * scale + late
            if self.spike and step == self.spike[0] and (kind, mb) == ("B", 1):  # late on all stages
                late = 300.0
            actions.append(Action(kind, mb, begin, end * scale + late, stage))
        return Timeline(rank, step, 320.0 + late, actions)

    def _peers(self, rank: int, step: int) -> Peers:
        """The bytes that a rank sends to each peer in the all-to-all: about 512 KiB in total. The rank `hot_peer`, if
        it is set, gets about three times as much as each other peer."""
        first = rank - self.coords(rank)["ep"]
        group = [peer for peer in range(first, first + self.ep) if peer != rank]
        weight = {
            peer: (3 if peer == self.hot_peer else 1) * (1 + 0.1 * wave(step, rank + 3 * peer))
            for peer in group
        }
        unit = 524_288 / sum(weight.values())
        return Peers(rank, step, [ToPeer(peer, int(unit * share)) for peer, share in weight.items()])

    def _load(self, layer: int, step: int) -> LayerLoad:
        share = 8192 // self.experts
        load = [
            max(0, int(share * (1 + 0.35 * math.sin(2.1 * expert + 1.7 * layer) + 0.05 * wave(step, expert))))
            for expert in range(self.experts)
        ]
        for expert in range(self.experts):
            if step >= self.dead.get((layer, expert), step + 1):
                load[expert] = 0
            if step >= self.hot.get((layer, expert), step + 1):
                load[expert] = 3 * sum(load) // self.experts
        return LayerLoad(layer, load, 0 if self.knobs["capacity_factor"] is None else sum(load) // 60)

    def _summary(self, step: int, base: float, load: list[LayerLoad]) -> Summary:
        return Summary(
            step=step,
            revision=self.revision,
            time_s=START_S + step / 2,
            loss=2.05 + 3.4 * math.exp(-step / 60) + 0.05 * wave(step, 3),
            grad_norm=1.1,
            step_ms=base,
            tokens_per_s=32 * 128 * 1000 / base,
            mfu=None,
            bubble=0.214,
            bubble_bound=0.2,
            oversubscribed=self.oversubscribed,
            a2a_bytes=524_288 * self.world if self.ep > 1 else 0,
            comm=self._comm(step, self.world),
            dropped=sum(layer.dropped for layer in load),
            load_max_over_mean=1.35,
            knobs=self.knobs,
            lr=3e-4,
        )

    def change(self, step: int, command: str = "c1", **changes: Value) -> Iterator[Update]:
        """The updates that a client receives when an operator changes knobs, from the hub's acceptance of the proposal
        to the last rank's ack."""
        self.revision += 1
        before = {name: self.knobs[name] for name in changes}
        common = {
            "changes": dict(changes),
            "before": before,
            "who": "ada@login",
            "time_s": START_S + step / 2 - 0.3,
        }
        yield CommandState(command, self.revision, "accepted", world=self.world, **common)
        self.knobs = self.knobs | changes
        yield self.board()
        yield CommandState(
            command, self.revision, "applied", acks=self.world, world=self.world, applied_step=step, **common
        )
        spelled = ", ".join(f"{name}={value}" for name, value in changes.items())
        yield Event(
            START_S + step / 2, "info", "hub", f"revision {self.revision} applied at step {step}: {spelled}"
        )

    def trial(self, id: str, state: str, to: int, **facts: object) -> TrialState:
        """A trial that changes micro_batches from 8 to a new number (`to`), by default started by another operator."""
        common: dict[str, object] = {"steps": 30, "who": "bob@login", "time_s": START_S, "loss_neutral": True}
        common |= {"began_s": START_S, "changes": {"micro_batches": to}, "before": {"micro_batches": 8}}
        return TrialState(id, state, **(common | facts))  # type: ignore[arg-type]

    def story(self, steps: int, change_at: int | None = None) -> Iterator[Update]:
        """The updates of the first `steps` steps of the run. At step `change_at`, if it is given, an operator sets
        micro_batches to 8."""
        yield from self.begin()
        for step in range(steps):
            if step == change_at:
                yield from self.change(step, micro_batches=8)
            yield from self.step(step)


def big() -> FakeRun:
    """1024 ranks."""
    return FakeRun(
        pp=8,
        dp=16,
        tp=8,
        ep=32,
        layers=8,
        experts=64,
        oversubscribed=False,
        slow_rank=517,
        straggler_alert=True,
    )


def wave(step: int, seed: int) -> float:
    """A deterministic substitute for noise, in [-1, 1]."""
    return math.sin(12.9898 * step + 78.233 * seed)


def one_f_one_b(stages: int, micro: int) -> list[list[tuple[str, int, float, float]]]:
    """A 1F1B schedule in which a forward pass takes 1 unit of time and a backward pass 2 units. Returns a list for each
    stage, with its actions as tuples (kind, micro-batch, start, end)."""
    ready: dict[tuple[str, int, int], float] = {}
    lines: list[list[tuple[str, int, float, float]]] = [[] for _ in range(stages)]
    queues = []
    for stage in range(stages):
        warm = min(stages - stage, micro)
        order = [("F", mb) for mb in range(warm)]
        for mb in range(micro):
            order.append(("B", mb))
            if warm + mb < micro:
                order.append(("F", warm + mb))
        queues.append(order)
    clock = [0.0] * stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, mb = queue[0]
                before = (kind, mb, stage - 1) if kind == "F" else (kind, mb, stage + 1)
                edge = stage == 0 if kind == "F" else stage == stages - 1
                if not edge and before not in ready:
                    break
                start = max(clock[stage], 0.0 if edge else ready[before])
                clock[stage] = end = start + (1.0 if kind == "F" else 2.0)
                ready[kind, mb, stage] = end
                lines[stage].append((kind, mb, start, end))
                queue.pop(0)
    return lines
