"""The hub's detectors raise the expected alerts for each shipped scenario, and none for a run without a scenario."""

from pathlib import Path

import pytest

from agents.alerts.detection import Detection, all_detectors
from agents.protocol import Alert
from agents.state.run_state import RunState
from engine.simulate.scenario import KINDS, Scenario, load_scenario
from tests.unit.engine.simulate.simulated import Run, small

SCENARIOS = Path(__file__).parents[4] / "layouts" / "scenarios"
STEPS = 110


def alerts(run: Run, steps: int = STEPS) -> list[Alert]:
    """The alerts that the hub's detectors raise during a run. The detectors run after each step."""
    state, raised = RunState(), []
    detection = Detection(all_detectors(), cpu_s=lambda: 0.0)
    for message in run.introductions():
        state.apply(message)  # type: ignore[arg-type]
    for number in range(steps):
        for message in run.messages(run.step()):
            state.apply(message)  # type: ignore[arg-type]
        raised += [alert for alert in detection.check(state, float(number)) if alert.active]
    assert not detection.problems
    return raised


def test_a_quiet_run_raises_nothing() -> None:
    assert alerts(Run()) == []


EXPECTED = {
    "straggler": {("straggler", "rank 5")},
    "throttled-node": {("throttle", "thermal")},
    "router-collapse": {("collapse", "run"), ("dead_experts", "run")},
    "loss-spike": {("loss_spike", "run"), ("gradient_spike", "run"), ("nan", "run")},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_scenario_is_detected(name: str) -> None:
    found = alerts(Run(scenario=load_scenario(SCENARIOS / f"{name}.toml")))
    assert {(alert.name, alert.subject) for alert in found} >= EXPECTED[name]
    first = min(event.step for event in load_scenario(SCENARIOS / f"{name}.toml").events)
    assert all(alert.step >= first for alert in found), "nothing is raised before the event"


def test_skew_drops_tokens_at_a_capacity() -> None:
    scenario = load_scenario(SCENARIOS / "skew.toml")
    found = alerts(Run(small("knobs.capacity_factor=1.5", "knobs.aux_loss_coef=0.1"), scenario))
    assert {alert.name for alert in found} == {"drops"} and min(alert.step for alert in found) >= 30


def test_every_shipped_scenario_is_legal_and_every_kind_of_event_has_a_test() -> None:
    shipped = [load_scenario(path) for path in SCENARIOS.glob("*.toml")]
    for scenario in shipped:
        Run(scenario=scenario)
    assert {event.kind for scenario in shipped for event in scenario.events} == set(KINDS)


def test_slow_links_of_a_node_slow_down_the_run_and_not_its_own_time() -> None:
    slow = '[[events]]\nkind = "network"\nstep = 10\nnode = 1\nfactor = 20.0'
    quiet, noisy = Run(), Run(scenario=slow)
    a, b = quiet.steps(12)[-1], noisy.steps(12)[-1]
    assert b.summary.step_ms > 1.5 * a.summary.step_ms
    assert not [alert for alert in alerts(Run(scenario=slow), 60) if alert.name == "straggler"]


def test_a_straggler_names_itself_by_waiting_least() -> None:
    run = Run(scenario='[[events]]\nkind = "straggler"\nstep = 0\nrank = 9\nfactor = 2.0')
    steps = [message for message in run.messages(run.steps(3)[-1]) if hasattr(message, "own_ms")]
    own = {step.rank: step.own_ms for step in steps}
    assert max(own, key=lambda rank: own[rank]) == 9
    assert Scenario().events == ()
