"""Detectors for the training itself: loss, gradient norm, routing, dead experts."""

import math

import pytest
from msgspec import structs

from agents.alerts.detection import Detection
from agents.alerts.finding import Finding
from agents.alerts.training import DeadExperts, Loss, Routing
from agents.protocol import Experts, ExpertShare, LayerLoad, Loads, LoadSummary
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_summary


def losses(*values: float) -> list[list[Finding] | None]:
    state, loss, said = RunState(), Loss(), []
    for step, value in enumerate(values):
        state.apply(structs.replace(make_summary(step), loss=value))
        said.append(loss.check(state, float(step)))
    assert loss.check(state, 99.0) is None
    return said


USUAL = [2.0 + 0.02 * (n % 5) for n in range(20)]


def test_a_spike_lasts_until_the_loss_is_normal_again() -> None:
    said = losses(*USUAL, 3.5, 3.2, 2.1)
    assert [len(found or []) for found in said[-4:]] == [0, 1, 1, 0]
    assert said[-3] and said[-3][0].name == "loss_spike" and "usual 2.0" in said[-3][0].text


def test_a_falling_or_noisy_loss_is_not_a_spike() -> None:
    assert not any(losses(*(5.0 * 0.9**n for n in range(30)), *USUAL))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nan_loss_is_an_error_and_stays_out_of_the_baseline(bad: float) -> None:
    said = losses(*USUAL, bad, 2.0, 3.5)
    assert [finding.name for found in said[-3:] for finding in found or []] == ["nan", "loss_spike"]


@pytest.mark.parametrize(
    ("scale", "loss", "found"), [(1024.0, 2.0, []), (None, 2.0, ["nan"]), (1024.0, math.nan, ["nan"])]
)
def test_an_overflow_in_fp16_is_no_alert(scale: float | None, loss: float, found: list[str]) -> None:
    state = RunState()
    state.apply(
        structs.replace(make_summary(0), loss=loss, grad_norm=math.inf, skipped=True, loss_scale=scale)
    )
    assert [finding.name for finding in Loss().check(state, 0.0) or []] == found


def test_a_gradient_norm_far_above_the_median() -> None:
    state, loss = RunState(), Loss()
    for step in range(12):
        state.apply(structs.replace(make_summary(step), grad_norm=35.0 if step == 11 else 1.0))
    (found,) = loss.check(state, 0.0) or []
    assert found.name == "gradient_spike" and "35 times" in found.text


STARVING, FED = [100] * 7 + [0], [100] * 8


def dead(*loads: list[int], every: int = 1) -> list[Finding]:
    state, detector = RunState(), DeadExperts()
    for sample, load in enumerate(loads):
        state.apply(Experts(sample * every, [LayerLoad(2, load, 0)]))
        found = detector.check(state, 0.0)
        assert detector.check(state, 0.0) is None
    return found or []


def test_an_expert_without_tokens_in_consecutive_samples_is_dead() -> None:
    (found,) = dead(*[STARVING] * 9)
    assert (found.name, found.subject) == ("dead_experts", "run")
    assert found.text == (
        "1 expert in 1 of 1 layers had under 1 % of an even share in each of the last samples: layer 2: expert 7 of 8"
    )
    assert dead(*[STARVING] * 8) == []
    assert dead(*[STARVING] * 8, FED, *[STARVING] * 3) == []


def test_distant_samples_count_by_steps_and_two_are_not_enough() -> None:
    assert dead(STARVING, STARVING, STARVING, every=20)
    assert dead(STARVING, STARVING, every=20) == []


def test_dead_experts_of_many_layers_are_one_alert_whose_count_is_updated() -> None:
    """With one alert per layer, other alerts would be lost among dozens of lines when a router collapses."""
    state, watch = RunState(), Detection([DeadExperts()], cpu_s=lambda: 0.0)
    said = []
    for sample in range(30):
        layers = [
            LayerLoad(layer, [100] * (60 - layer // 4) + [0] * (4 + layer // 4), 0)
            for layer in range(24)
            if sample < 15 or layer < 23
        ]
        state.apply(Experts(2 * sample, layers))
        for alert in watch.check(state, float(sample)):
            state.apply(alert)
            said.append(alert.text)
    assert len(said) == 2 and list(state.alerts) == [("dead_experts", "run")]
    assert said[0].startswith("156 experts in 24 of 24 layers") and said[1].startswith(
        "147 experts in 23 of 23"
    )
    assert said[0].endswith(
        "layer 20: 9 experts of 64, layer 21: 9 experts of 64, layer 22: 9 experts of 64, layer 23: 9 experts of 64, "
        "and 20 more layers"
    )


def routed(*layers: LoadSummary) -> list[str]:
    state, detector = RunState(), Routing()
    for step, layer in enumerate(layers):
        state.apply(Loads(step, [layer]))
        found = detector.check(state, 0.0)
        assert detector.check(state, 0.0) is None
    return [finding.text for finding in found or []]


def summary_of(entropy: float = 0.95, dropped: int = 0) -> LoadSummary:
    return LoadSummary(2, 1000, 3.0, 1.0, entropy, [ExpertShare(0, 0.86)], 0, dropped)


def test_a_router_that_sends_all_to_one_collapses() -> None:
    (text,) = routed(summary_of(entropy=0.3))
    assert text == "the router of layer 2 collapses: expert 0 gets 86 % of the tokens, evenness 0.30 of 1"
    assert routed(summary_of(entropy=0.6)) == []


def test_a_collapse_lasts_until_well_above_the_limit() -> None:
    assert routed(summary_of(0.49), summary_of(0.51))
    assert routed(summary_of(0.49), summary_of(0.56), summary_of(0.51)) == []


def test_several_collapsed_layers_are_one_finding_that_names_the_worst() -> None:
    state, detector = RunState(), Routing()
    bad = [structs.replace(summary_of(0.1 + 0.02 * n, 60 + 10 * n), layer=n) for n in range(8)]
    state.apply(Loads(0, [*bad, structs.replace(summary_of(), layer=8)]))
    collapse, drops = detector.check(state, 0.0) or []
    assert collapse.text.startswith(
        "the router of layer 0 collapses: expert 0 gets 86 % of the tokens, evenness 0.10"
    )
    assert collapse.text.endswith(
        "; also in 7 more of 9 layers: layer 1 0.12, layer 2 0.14, layer 3 0.16, layer 4 0.18, and 3 more layers"
    )
    assert drops.text.startswith("8 of 9 layers drop tokens at this capacity: layer 7 13.0 %, layer 6 12.0 %")


def test_a_drop_alert_lasts_until_well_below_the_limit() -> None:
    assert routed(summary_of(dropped=60)) == ["layer 2 drops 6.0 % of its tokens at this capacity"]
    assert routed(summary_of(dropped=60), summary_of(dropped=40))
    assert routed(summary_of(dropped=60), summary_of(dropped=20), summary_of(dropped=40)) == []
