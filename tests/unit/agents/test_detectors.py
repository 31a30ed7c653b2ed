"""Each detector speaks when it should, says whom and why, and is silent otherwise; and the hysteresis around them."""

import inspect
import math
import re
import sys
from collections.abc import Iterable
from typing import Any

import pytest
from msgspec import structs

from agents.alerts.detection import REPUBLISH_S, Detection, all_detectors
from agents.alerts.devices import Memory, Throttle
from agents.alerts.finding import SEVERITY_ORDER, Finding, by_severity
from agents.alerts.ranks import Lost, Stall
from agents.alerts.stragglers import Slowdown, Straggler
from agents.alerts.training import DeadExperts, Loss, Routing
from agents.protocol import (
    Alert,
    Experts,
    ExpertShare,
    Gone,
    LayerLoad,
    Loads,
    LoadSummary,
    Pulse,
    Step,
    Traffic,
    Update,
    Vitals,
)
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_hello, make_step, make_summary

WORLD = 8
WAIT = "dp all-reduce, layer 1"


def run_of(world: int = WORLD, step_ms: float = 100.0) -> RunState:
    state = RunState()
    for rank in range(world):
        coords = {"pp": rank // (world // 2), "dp": rank % (world // 2)}
        state.apply(make_hello(rank, world, coords=coords))
    state.apply(structs.replace(make_summary(0), step_ms=step_ms))
    return state


def feed(state: RunState, updates: Iterable[Update]) -> None:
    for update in updates:
        state.apply(update)


# ------------------------------------------------------------------------------------------------- stall


def stalled(
    doing: dict[int, str], silent: tuple[int, ...] = (), steps: dict[int, int] | None = None
) -> list[Finding]:
    """What Stall says when ranks have been `doing` that for a minute, and `silent` ones sent no pulse lately."""
    state, stall = run_of(), Stall()
    for second in range(6):
        feed(
            state,
            (
                Pulse(rank, (steps or {}).get(rank, 7), doing[rank], 60_000.0 + 1000 * second)
                for rank in range(WORLD)
                if rank not in silent or second == 0
            ),
        )
        found = stall.check(state, float(second))
    return found


@pytest.mark.parametrize(
    ("doing", "silent", "steps", "late"),
    [
        ({3: "backward, micro-batch 2"}, (), {}, (3,)),
        ({}, (5,), {}, (5,)),
        ({}, (), {2: 6}, (2,)),
        ({1: "tp all-gather, layer 0", 4: "tp all-gather, layer 0"}, (), {}, (1, 4)),
    ],
    ids=["at work", "silent", "a step behind", "in another collective"],
)
def test_a_stall_names_whom_the_others_wait_for(
    doing: dict[int, str], silent: tuple[int, ...], steps: dict[int, int], late: tuple[int, ...]
) -> None:
    (found,) = stalled(dict.fromkeys(range(WORLD), WAIT) | doing, silent, steps)
    assert found.ranks == late
    assert f"{WORLD - len(late)} of {WORLD} ranks wait in {WAIT}" in found.text
    assert ("pp" in found.text) == (len(late) == 1)


def test_a_suspended_rank_is_whom_the_others_wait_for() -> None:
    state, stall = run_of(), Stall()
    feed(state, (Pulse(rank, 7, "waiting for a pipeline neighbour", 60_000.0) for rank in range(WORLD)))
    state.apply(Gone(5, clean=False, text="process 9 is suspended", process="stopped"))
    (found,) = stall.check(state, 0.0)
    assert found.ranks == (5,)
    assert "7 of 8 ranks wait for a pipeline neighbour; rank 5 (pp1 dp1) not heard" in found.text
    assert [one.name for one in Lost().check(state, 0.0)] == ["silent"]


def test_a_paused_run_and_a_long_checkpoint_are_no_stall() -> None:
    for doing in ("paused", "checkpoint", "starting"):
        assert stalled(dict.fromkeys(range(WORLD), doing)) == []


def test_what_takes_long_in_a_slow_run_is_no_stall() -> None:
    state, stall = run_of(step_ms=60_000.0), Stall()
    feed(state, (Pulse(rank, 7, WAIT, 200_000.0) for rank in range(WORLD)))
    assert stall.check(state, 0.0) == []
    feed(state, (Pulse(rank, 7, WAIT, 301_000.0) for rank in range(WORLD)))
    assert stall.check(state, 1.0)


# --------------------------------------------------------------------------------------------- straggler


def steps_of(step: int, own_ms: dict[int, float]) -> list[Step]:
    """Records of one step in which each rank works 60 ms by itself, or as given, and waits for the rest of 100."""
    return [
        structs.replace(
            make_step(rank, step),
            step_ms=100.0,
            comm={"dp": Traffic(0, 100.0 - own_ms.get(rank, 60.0), 100.0 - own_ms.get(rank, 60.0))},
        )
        for rank in range(WORLD)
    ]


def watched_steps(
    own_ms: dict[int, float], steps: int = 8, world: int = WORLD, shared: bool = False
) -> list[Finding]:
    state, straggler = run_of(world), Straggler()
    state.apply(structs.replace(make_summary(1), oversubscribed=shared))
    for step in range(steps):
        own = {rank: own and own + step % 3 for rank, own in own_ms.items()}
        feed(state, [record for record in steps_of(step, own) if record.rank < world])
        found = straggler.check(state, float(step))
    return found or []


def test_a_straggler_is_found_among_those_with_its_work() -> None:
    (found,) = watched_steps({6: 90.0})
    assert found.ranks == (6,) and found.subject == "rank 6"
    assert "+52%" in found.text and "3 ranks" in found.text


def test_a_whole_stage_with_more_work_is_no_straggler() -> None:
    assert watched_steps({4: 90.0, 5: 91.0, 6: 90.0, 7: 92.0}) == []


def test_peers_that_only_wait_are_not_judged() -> None:
    assert watched_steps(dict.fromkeys(range(WORLD), 0.0) | {6: 50.0}) == []


def test_one_slow_step_is_no_straggler() -> None:
    state, straggler = run_of(), Straggler()
    for step in range(9):
        feed(state, steps_of(step, {6: 95.0} if step == 8 else {}))
        found = straggler.check(state, float(step))
    assert found == []


def test_a_rank_that_was_slow_is_so_until_it_is_well_under_the_limit() -> None:
    state, straggler = run_of(), Straggler()
    said = []
    for step, own in enumerate([90.0] * 6 + [66.0] * 6 + [62.0] * 6 + [66.0] * 6):
        feed(state, steps_of(step, {6: own}))
        said.append(bool(straggler.check(state, float(step))))
    assert said == [False] * 4 + [True] * 10 + [False] * 10


def test_of_two_ranks_of_a_stage_the_slower_is_named() -> None:
    (found,) = watched_steps({2: 90.0}, world=4)
    assert found.ranks == (2,) and "against the other rank with the same work" in found.text
    assert watched_steps({2: 75.0}, world=4) == [], "one figure says less than a median"


def test_a_rank_alone_in_its_stage_is_compared_with_its_own_past() -> None:
    state, straggler = run_of(2), Straggler()
    said = []
    for step in range(40):
        feed(state, steps_of(step, {1: 90.0 if step >= 25 else 60.0})[:2])
        said.append([one.text for one in straggler.check(state, float(step)) or []])
    assert not any(said[:27]) and said[-1] == [
        "rank 1 (pp1 dp0) needs 90 ms of its own a step, +50% against its own 60 ms before"
    ]


def test_a_knob_that_was_turned_makes_a_new_past() -> None:
    state, straggler = run_of(2), Straggler()
    for step in range(40):
        slow = {1: 90.0 if step >= 25 else 60.0}
        feed(state, [structs.replace(one, revision=int(step >= 25)) for one in steps_of(step, slow)[:2]])
        assert not straggler.check(state, float(step))


def test_ranks_that_share_cores_are_judged_over_more_steps_and_by_more() -> None:
    (found,) = watched_steps({6: 90.0}, steps=20, shared=True)
    assert found.ranks == (6,)
    assert watched_steps({6: 90.0}, steps=14, shared=True) == []
    assert watched_steps({6: 75.0}, steps=20, shared=True) == []


def slowed(*step_ms: float, shared: bool = False, revisions: dict[int, int] | None = None) -> list[list[str]]:
    state, slowdown, said = RunState(), Slowdown(), []
    for step, ms in enumerate(step_ms):
        revision = max((to for at, to in (revisions or {}).items() if step >= at), default=0)
        summary = structs.replace(make_summary(step), step_ms=ms, revision=revision, oversubscribed=shared)
        state.apply(summary)
        said.append([one.text for one in slowdown.check(state, 0.0) or []])
    assert slowdown.check(state, 0.0) is None
    return said


def test_a_run_that_slows_down_is_found_and_stays_found_until_it_is_fast_again() -> None:
    said = slowed(*[290.0] * 20, *[820.0] * 50, *[295.0] * 8)
    assert not any(said[:22])
    assert all(said[22:70]) and said[40] == ["the run has slowed down: 820 ms a step, 290 ms before"]
    assert not any(said[-5:])


def test_a_knob_that_makes_steps_longer_is_no_slowdown() -> None:
    assert not any(slowed(*[290.0] * 20, *[820.0] * 30, revisions={20: 1}))


def test_on_shared_cores_a_slowdown_is_more_and_says_what_may_be_the_cause() -> None:
    assert not any(slowed(*[290.0] * 20, *[400.0] * 20, shared=True))
    assert "another program" in slowed(*[290.0] * 20, *[820.0] * 20, shared=True)[-1][0]


# ---------------------------------------------------------------------------------------------- training


def losses(*values: float) -> list[list[Finding] | None]:
    state, loss, said = RunState(), Loss(), []
    for step, value in enumerate(values):
        state.apply(structs.replace(make_summary(step), loss=value))
        said.append(loss.check(state, float(step)))
    assert loss.check(state, 99.0) is None
    return said


USUAL = [2.0 + 0.02 * (n % 5) for n in range(20)]


def test_a_spike_lasts_until_the_loss_is_back() -> None:
    said = losses(*USUAL, 3.5, 3.2, 2.1)
    assert [len(found or []) for found in said[-4:]] == [0, 1, 1, 0]
    assert said[-3] and said[-3][0].name == "loss_spike" and "usual 2.0" in said[-3][0].text


def test_a_loss_that_falls_or_wavers_is_no_spike() -> None:
    assert not any(losses(*(5.0 * 0.9**n for n in range(30)), *USUAL))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_an_error_and_spoils_no_history(bad: float) -> None:
    said = losses(*USUAL, bad, 2.0, 3.5)
    assert [finding.name for found in said[-3:] for finding in found or []] == ["nan", "loss_spike"]


def test_a_gradient_norm_far_above_the_usual() -> None:
    state, loss = RunState(), Loss()
    for step in range(12):
        state.apply(structs.replace(make_summary(step), grad_norm=35.0 if step == 11 else 1.0))
    (found,) = loss.check(state, 0.0) or []
    assert found.name == "gradient_spike" and "35 times" in found.text


def dead(*loads: list[int], every: int = 1) -> list[Finding]:
    state, detector = RunState(), DeadExperts()
    for sample, load in enumerate(loads):
        state.apply(Experts(sample * every, [LayerLoad(2, load, 0)]))
        found = detector.check(state, 0.0)
        assert detector.check(state, 0.0) is None
    return found or []


STARVING, FED = [100] * 7 + [0], [100] * 8


def test_an_expert_is_dead_when_it_starves_for_steps_running() -> None:
    (found,) = dead(*[STARVING] * 9)
    assert (found.name, found.subject) == ("dead_experts", "run")
    assert found.text == (
        "1 expert in 1 of 1 layers had under 1% of an even share in each of the last samples: layer 2: expert 7 of 8"
    )
    assert dead(*[STARVING] * 8) == []
    assert dead(*[STARVING] * 8, FED, *[STARVING] * 3) == []


def test_samples_that_are_far_apart_count_by_their_steps_and_two_are_not_enough() -> None:
    assert dead(STARVING, STARVING, STARVING, every=20)
    assert dead(STARVING, STARVING, every=20) == []


def test_dead_experts_of_many_layers_are_one_alert_whose_count_is_updated() -> None:
    """24 layers of 64 experts buried a collapsing router under 85 lines."""
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


def test_the_gravest_alert_comes_first() -> None:
    names = [("drops", "warning"), ("new_kind", "error"), ("collapse", "error"), ("straggler", "warning")]
    alerts = [Alert(name, "run", level, True, 1, 1.0, "") for name, level in names]  # type: ignore[arg-type]
    alerts += [Alert("collapse", "older", "error", True, 1, 0.5, "")]
    order = [(alert.name, alert.subject) for alert in by_severity(alerts)]
    assert [name for name, _ in order] == ["collapse", "collapse", "new_kind", "straggler", "drops"]
    assert order[1] == ("collapse", "older")
    assert {one for detector in all_detectors() for one in names_in(detector)} <= set(SEVERITY_ORDER)


def names_in(detector: object) -> set[str]:
    """The names that a detector's module gives its findings."""
    source = inspect.getsource(sys.modules[type(detector).__module__])
    return set(re.findall(r'Finding\(\s*"(\w+)"', source))


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
    assert text == "the router of layer 2 collapses: expert 0 gets 86% of the tokens, evenness 0.30 of 1"
    assert routed(summary_of(entropy=0.6)) == []


def test_layers_that_do_the_same_are_one_finding_and_the_worst_is_named() -> None:
    state, detector = RunState(), Routing()
    bad = [structs.replace(summary_of(0.1 + 0.02 * n, 60 + 10 * n), layer=n) for n in range(8)]
    state.apply(Loads(0, [*bad, structs.replace(summary_of(), layer=8)]))
    collapse, drops = detector.check(state, 0.0) or []
    assert collapse.text.startswith(
        "the router of layer 0 collapses: expert 0 gets 86% of the tokens, evenness 0.10"
    )
    assert collapse.text.endswith(
        "; so do those of 7 more of 9 layers: layer 1 0.12, layer 2 0.14, layer 3 0.16, layer 4 0.18, and 3 more layers"
    )
    assert drops.text.startswith("8 of 9 layers drop tokens at this capacity: layer 7 13.0%, layer 6 12.0%")


def test_drops_are_held_on_to_until_they_are_well_under_the_limit() -> None:
    assert routed(summary_of(dropped=60)) == ["layer 2 drops 6.0% of its tokens at this capacity"]
    assert routed(summary_of(dropped=60), summary_of(dropped=40))
    assert routed(summary_of(dropped=60), summary_of(dropped=20), summary_of(dropped=40)) == []


# ----------------------------------------------------------------------------------------------- devices

GIB = 2**30


def test_memory_near_its_limit_on_a_device_and_on_a_machine() -> None:
    state, memory = run_of(), Memory()
    said = []
    for device, host in ((70, 10), (78, 61), (75, 60), (70, 10)):
        memory_of = {"device_memory_total": 80 * GIB, "host_memory_total": 64 * GIB}
        state.apply(Vitals(3, 7, device_memory_bytes=device * GIB, host_memory_bytes=host * GIB, **memory_of))
        said.append([finding.subject.split()[0] for finding in memory.check(state, 0.0) or []])
    assert said == [[], ["rank", "host"], ["rank", "host"], []]
    assert memory.check(state, 0.0) is None, "one reading counts once"


def test_no_data_is_no_finding() -> None:
    state = run_of()
    state.apply(Vitals(3, 7))
    assert Memory().check(state, 0.0) == Throttle().check(state, 0.0) == []


def test_devices_that_one_reason_slows_down_are_one_alert() -> None:
    state = run_of()
    for rank in (2, 5):
        state.apply(Vitals(rank, 7, throttle=["thermal slowdown", "idle"], temperature_c=88.4, power_w=612.0))
    (found,) = Throttle().check(state, 0.0) or []
    assert found.text == "ranks 2, 5: clocks held down by thermal slowdown (88 °C, 612 W on rank 2)"


# ------------------------------------------------------------------------------------------------- watch


class Said:
    """A detector that says what it is told to; None: it had nothing to judge by."""

    holds, releases = 2, 3

    def __init__(self) -> None:
        self.next: list[Finding] | None = []

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        return self.next


def test_an_alert_is_raised_late_ends_late_and_is_told_anew() -> None:
    said, state = Said(), RunState()
    watch = Detection([said], cpu_s=lambda: 0.0)
    there, changed = [Finding("stall", "run", "error", "a")], [Finding("stall", "run", "error", "b")]
    story = [there, [], there, None, there, changed, [], there, [], [], []]
    told = []
    for second, said.next in enumerate(story):
        told += [(second, alert.active) for alert in watch.check(state, float(second))]
    assert told == [(4, True), (10, False)]
    said.next = there
    assert not watch.check(state, 20.0) and watch.check(state, 21.0)
    said.next = changed
    assert not watch.check(state, 22.0)
    assert [alert.text for alert in watch.check(state, 21.0 + REPUBLISH_S)] == ["b"]


def test_a_detector_that_fails_is_left_out_and_the_others_go_on() -> None:
    class Failing(Said):
        def check(self, state: RunState, now_s: float) -> list[Finding] | None:
            raise ZeroDivisionError

    said = Said()
    watch = Detection([Failing(), said], cpu_s=lambda: 0.0)
    said.next = [Finding("stall", "run", "error", "a")]
    assert [len(watch.check(RunState(), float(second))) for second in range(3)] == [0, 1, 0]
    assert watch.problems == ["the detector Failing failed and is disabled: ZeroDivisionError()"]


def test_looks_are_spaced_by_what_they_cost() -> None:
    clock = iter([0.0, 0.1] * 100)
    said = Said()
    watch = Detection([said], cpu_s=lambda: next(clock))
    said.next = [Finding("stall", "run", "error", "a")]
    told = [second for second in range(20) if watch.check(RunState(), float(second))]
    assert told == [5]  # 0.1 s of work is 2 % of 5 s


def test_a_lost_rank_is_found_by_all_detectors_together() -> None:
    state = run_of()
    state.apply(Gone(3, clean=False, text="no word for 5 s: process 7 has ended", process="ended"))
    state.apply(Gone(4, clean=True))
    (alert,) = Detection(all_detectors(), cpu_s=lambda: 0.0).check(state, 0.0)
    assert alert.text == "rank 3 (pp0 dp3) is lost: no word for 5 s: process 7 has ended" and alert.ranks == [
        3
    ]
    assert Lost().check(run_of(), 0.0) == []


@pytest.mark.parametrize(
    ("process", "name", "words"),
    [
        ("ended", "lost", "lost"),
        ("stopped", "silent", "silent"),
        ("alive", "silent", "silent"),
        ("unknown", "unheard", "not heard"),
    ],
)
def test_a_rank_that_is_not_heard_is_told_by_its_process(process: Any, name: str, words: str) -> None:
    state = run_of()
    state.apply(Gone(3, clean=False, text="no word for 5 s", process=process))
    (found,) = Lost().check(state, 0.0)
    assert (found.name, found.text) == (name, f"rank 3 (pp0 dp3) is {words}: no word for 5 s")
    assert state.gone[3].over == (process == "ended"), "only a process that has ended is never heard again"
