"""Tests the diagnosis of simulated faults: it is correct within 20 steps of the fault, and a run without a fault has
no diagnosis."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from agents.alerts.detection import Detection, all_detectors
from agents.protocol import codec
from cockpit.data.diagnosis.diagnosis import Diagnosis, Level, diagnosis
from cockpit.data.store import Store
from engine.simulate.session import outage
from engine.simulate.simulator import Simulated
from engine.simulate.telemetry.packing import frames
from engine.simulate.telemetry.records import Operation
from tests.unit.engine.simulate.simulated import Run, small

SCENARIOS = Path(__file__).parents[5] / "layouts" / "scenarios"
BEGINS, WITHIN = 30, 20  # step at which the scenario begins, and steps until the diagnosis must be correct
HANG_S = 20
# overrides with which the pipeline bubble is small
HEALTHY = (
    "model.layers=16",
    "train.global_batch=256",
    "knobs.micro_batches=32",
)
# Expert parallelism spans nodes, and there is no tensor parallelism.
BETWEEN_NODES = (
    *("grid.tp=1", "grid.dp_shard=16", "grid.ep=16"),
    *("train.global_batch=1024", "knobs.micro_batches=32"),
)


@dataclass(frozen=True)
class Case:
    """A fault scenario of the simulator, and the diagnosis that the cockpit must show for it."""

    scenario: str
    causes: set[str]
    words: str = ""
    ranks: frozenset[int] = frozenset()  # the ranks that the diagnosis may name; empty: any ranks
    layout: tuple[str, ...] = HEALTHY


CASES = (
    Case("straggler", {"straggler"}, "rank 5 ", frozenset({5})),
    Case("throttled-node", {"throttle"}, "throttled by thermal", frozenset(range(8, 16))),
    Case("skew", {"hot_expert"}, "its share"),
    Case("router-collapse", {"collapse"}, "the router of layer"),
    Case("slow-network", {"ep"}, "expert all-to-alls slow down the run"),
    Case("memory-leak", {"memory"}, "of its 80.0 GiB of memory"),
    Case("hang", {"stall"}, "not arrived: in forward", frozenset({5})),
    Case("slowdown", {"slowdown"}, "the run has slowed down"),
    Case("loss-spike", {"loss_spike"}, "is far above the usual"),
)


class Watched:
    """A simulated run with the hub's detectors and a client's store, on a simulated clock."""

    def __init__(self, overrides: tuple[str, ...], scenario: str, seed: int):
        text = (SCENARIOS / f"{scenario}.toml").read_text() if scenario else ""
        self.run = Run(small(*overrides), text, seed)
        self._now_s = 0.0
        self._detection = Detection(all_detectors(), cpu_s=lambda: 0.0)
        self.store = Store(lambda: self._now_s)
        self.store.apply(self.run.introductions())  # type: ignore[arg-type]

    def steps(self, count: int) -> Iterator[tuple[int, Diagnosis]]:
        """Yields each step with the diagnosis after that step; while a rank hangs, yields one diagnosis per second."""
        for _ in range(count):
            found = self.run.step()
            if found.conditions.hung.any():
                yield from self._hang(found)
            self._now_s += found.times.step_s
            everyone = [Operation(np.arange(self.run.simulator.cluster.world), "optimizer", 0.0)]
            yield found.step, self._seen(chain(self._pulses(found, everyone), self.run.messages(found)))

    def _hang(self, found: Simulated) -> Iterator[tuple[int, Diagnosis]]:
        for second in range(HANG_S):
            self._now_s += 1.0
            yield found.step, self._seen(self._pulses(found, outage(found, second * 1e3)))

    def _pulses(self, found: Simulated, operations: list[Operation]) -> Iterator[object]:
        for rows in self.run.records.pulses(found.step, operations):
            for frame in frames(rows):
                yield from codec.decode(frame)

    def _seen(self, messages: Iterator[object]) -> Diagnosis:
        self.store.apply(messages)  # type: ignore[arg-type]
        self.store.set_message_age(0.1)
        self.store.apply(self._detection.check(self.store.state, self._now_s))
        return diagnosis(self.store)


def check(case: Case, seed: int) -> None:
    watched = Watched(case.layout, case.scenario, seed)
    seen = list(watched.steps(BEGINS + WITHIN + 1))
    early = [found for step, found in seen if step < BEGINS]
    assert all(not found.headline for found in early), f"seed {seed}: {early[-1].sentence}"
    right = [found for _, found in seen if found.cause in case.causes]
    assert right, f"seed {seed}: {seen[-1][1].sentence}"
    assert any(case.words in found.text for found in right), right[0].sentence
    assert all(found.rank in case.ranks for found in right if case.ranks), right[0].sentence
    found = right[-1]
    assert found.advice and found.headline
    assert found.since is None or BEGINS <= found.since <= BEGINS + WITHIN
    if found.cause in ("straggler", "slowdown"):
        assert found.since is not None and found.since <= BEGINS + 1, f"seed {seed}: {found.since}"


def check_healthy(seed: int) -> None:
    for step, found in Watched(HEALTHY, "", seed).steps(2 * BEGINS):
        assert found.level in (Level.GOOD, Level.NOTE), f"seed {seed}, step {step}: {found.sentence}"


def check_bound(overrides: tuple[str, ...], cause: str, seed: int) -> None:
    """Check the diagnosis of a run whose layout itself is the cause of a bottleneck."""
    *_, (_, found) = Watched(overrides, "", seed).steps(WITHIN)
    assert found.cause == cause and found.advice, f"seed {seed}: {found.sentence}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.scenario)
def test_the_diagnosis_of_each_scenario(case: Case) -> None:
    check(case, seed=1)


def test_a_healthy_run_has_no_diagnosis() -> None:
    check_healthy(seed=1)


BOUND = ((BETWEEN_NODES, "ep"), (("knobs.micro_batches=4",), "bubble"))


@pytest.mark.parametrize(("overrides", "cause"), BOUND, ids=lambda one: one if isinstance(one, str) else "")
def test_a_layout_that_is_bound_by_one_cause(overrides: tuple[str, ...], cause: str) -> None:
    check_bound(overrides, cause, seed=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.scenario)
def test_the_diagnosis_of_each_scenario_over_ten_seeds(case: Case) -> None:
    for seed in range(2, 11):
        check(case, seed)


@pytest.mark.exhaustive
def test_a_healthy_run_has_no_diagnosis_over_ten_seeds() -> None:
    for seed in range(2, 11):
        check_healthy(seed)


@pytest.mark.exhaustive
def test_layouts_that_are_bound_by_one_cause_over_ten_seeds() -> None:
    for seed in range(2, 11):
        for overrides, cause in BOUND:
            check_bound(overrides, cause, seed)
