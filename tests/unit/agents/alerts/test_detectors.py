"""Each detector reports a fault with its ranks and cause, and reports nothing without a fault. Hysteresis of alerts."""

import inspect
import re
import sys
from typing import Any

import pytest
from msgspec import structs

from agents.alerts.detection import REPUBLISH_S, Detection, all_detectors
from agents.alerts.devices import Memory, Throttle
from agents.alerts.finding import SEVERITY_ORDER, Finding, by_severity
from agents.alerts.ranks import ABSENT_S, Absent, Lost, Stall
from agents.protocol import Alert, Gone, Pulse, Vitals
from agents.state.run_state import RunState
from tests.unit.agents.detector_inputs import WORLD, feed, run_of
from tests.unit.agents.fleet import make_hello, make_summary

WAIT = "dp all-reduce, layer 1"


def test_a_rank_that_never_joins_is_named() -> None:
    state, absent = run_of(), Absent()
    for rank in (2, 5):
        del state.hellos[rank]
    assert absent.check(state, 0.0) == [] and absent.check(state, ABSENT_S - 1) == []
    (found,) = absent.check(state, ABSENT_S)
    assert (found.name, found.level, found.ranks) == ("absent", "error", (2, 5))
    assert found.text == "ranks 2, 5 have not joined: 6 of 8 ranks are here"
    state.apply(make_hello(2, WORLD))
    assert absent.check(state, ABSENT_S + 1) == [], "ranks still join"
    (found,) = absent.check(state, 2 * ABSENT_S + 1)
    assert found.text == "rank 5 has not joined: 7 of 8 ranks are here"
    feed(state, (Gone(rank, clean=True) for rank in state.hellos))
    assert absent.check(state, 9 * ABSENT_S) == [], "the run has ended"
    assert Absent().check(RunState(), 9 * ABSENT_S) == []


# ------------------------------------------------------------------------------------------------- stall


def stalled(
    doing: dict[int, str], silent: tuple[int, ...] = (), steps: dict[int, int] | None = None
) -> list[Finding]:
    """The findings of `Stall` if the ranks in `doing` have been in their operation for a minute, and those in `silent`
    have sent no pulse.
    """
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
def test_a_stall_names_the_rank_that_others_wait_for(
    doing: dict[int, str], silent: tuple[int, ...], steps: dict[int, int], late: tuple[int, ...]
) -> None:
    (found,) = stalled(dict.fromkeys(range(WORLD), WAIT) | doing, silent, steps)
    assert found.ranks == late
    assert f"{WORLD - len(late)} of {WORLD} ranks wait in {WAIT}" in found.text
    assert ("pp" in found.text) == (len(late) == 1)


@pytest.mark.parametrize("doing", ["tp all-gather, layer 0", "backward"])
def test_a_stall_in_which_all_ranks_do_the_same_names_no_late_rank(doing: str) -> None:
    (found,) = stalled(dict.fromkeys(range(WORLD), doing))
    assert found.text == f"the run is stuck at step 7; ranks 0, 1, 2, 3 and 4 more are in {doing}"


def test_a_stall_names_a_suspended_rank() -> None:
    state, stall = run_of(), Stall()
    feed(state, (Pulse(rank, 7, "waiting for a pipeline neighbour", 60_000.0) for rank in range(WORLD)))
    state.apply(Gone(5, clean=False, text="process 9 is suspended", process="stopped"))
    (found,) = stall.check(state, 0.0)
    assert found.ranks == (5,)
    assert "7 of 8 ranks wait for a pipeline neighbour; rank 5 (pp1 dp1) not heard" in found.text
    assert [one.name for one in Lost().check(state, 0.0)] == ["silent"]


def test_a_paused_run_or_a_long_checkpoint_is_not_a_stall() -> None:
    for doing in ("paused", "checkpoint", "starting"):
        assert stalled(dict.fromkeys(range(WORLD), doing)) == []


@pytest.mark.parametrize("doing", ["evaluation", "checkpoint", "expert placement, layer 3"])
def test_ranks_that_wait_for_an_evaluation_or_a_checkpoint_are_not_stalled(doing: str) -> None:
    """As when only one rank evaluates or saves, while the others are in the next collective."""
    assert stalled(dict.fromkeys(range(WORLD), WAIT) | {5: doing}) == []
    assert stalled(dict.fromkeys(range(WORLD), WAIT) | {5: doing}, silent=(5,)), "it is not heard any more"


def paused(
    seconds: float, *pauses: float, doing: dict[int, str] | None = None, steps: dict[int, int] | None = None
) -> list[Finding]:
    """The findings of `Stall` if all ranks have been between two steps for some seconds, except those in `doing`. The
    run has made steps of 1 s with the given pauses between them, in seconds."""
    state, stall, now = run_of(step_ms=1000.0), Stall(), 0.0
    for number, pause in enumerate((*pauses, 0.0)):
        state.apply(structs.replace(make_summary(number), time_s=now, step_ms=1000.0))
        now += 1.0 + pause
    for rank in range(WORLD):
        what = (doing or {}).get(rank, "between steps")
        state.apply(Pulse(rank, (steps or {}).get(rank, 7), what, 1e3 * seconds))
    return stall.check(state, 0.0)


def test_a_pause_after_a_step_is_not_a_stall_until_it_is_unusually_long() -> None:
    assert paused(25.0) == paused(599.0) == []
    (found,) = paused(601.0)
    assert found.text == "the run is stuck at step 7; ranks 0, 1, 2, 3 and 4 more are between steps"
    assert found.evidence["limit_s"] == 600.0
    # Data loading between all steps, and three evaluations of 30 s: the typical long pause is one of 30 s.
    usual = (0.1, 0.1, 30.0, 0.1, 31.0, 0.2, 29.0)
    assert paused(299.0, *usual) == [] and paused(301.0, *usual)
    assert paused(59.0, 2.0, 2.0) == [] and paused(61.0, 2.0, 2.0)


def test_a_pause_of_one_rank_while_the_others_wait_is_a_stall() -> None:
    others = dict.fromkeys(range(WORLD), WAIT)
    (found,) = paused(
        25.0, doing=others | {5: "between steps"}, steps=dict.fromkeys(range(WORLD), 8) | {5: 7}
    )
    assert found.ranks == (5,) and "rank 5 (pp1 dp1) not arrived: between steps" in found.text
    (found,) = paused(25.0, steps={6: 6})
    assert found.ranks == (6,) and "7 of 8 ranks wait between steps" in found.text


def test_a_long_operation_in_a_slow_run_is_not_a_stall() -> None:
    state, stall = run_of(step_ms=60_000.0), Stall()
    feed(state, (Pulse(rank, 7, WAIT, 200_000.0) for rank in range(WORLD)))
    assert stall.check(state, 0.0) == []
    feed(state, (Pulse(rank, 7, WAIT, 301_000.0) for rank in range(WORLD)))
    assert stall.check(state, 1.0)


def test_the_most_severe_alert_comes_first() -> None:
    names = [("drops", "warning"), ("new_kind", "error"), ("collapse", "error"), ("straggler", "warning")]
    alerts = [Alert(name, "run", level, True, 1, 1.0, "") for name, level in names]  # type: ignore[arg-type]
    alerts += [Alert("collapse", "older", "error", True, 1, 0.5, "")]
    order = [(alert.name, alert.subject) for alert in by_severity(alerts)]
    assert [name for name, _ in order] == ["collapse", "collapse", "new_kind", "straggler", "drops"]
    assert order[1] == ("collapse", "older")
    assert {one for detector in all_detectors() for one in names_in(detector)} <= set(SEVERITY_ORDER)


def names_in(detector: object) -> set[str]:
    """The names of all findings that the detector's module can create, extracted from the source code of the module."""
    source = inspect.getsource(sys.modules[type(detector).__module__])
    return set(re.findall(r'Finding\(\s*"(\w+)"', source))


# ----------------------------------------------------------------------------------------------- devices

GIB = 2**30


def test_memory_near_its_limit_on_a_device_and_on_a_machine() -> None:
    state, memory = run_of(), Memory()
    said = []
    for device, host in ((70, 10), (78, 61), (75, 60), (70, 10)):
        memory_of = {"device_memory_total": 80 * GIB, "host_memory_total": 64 * GIB}
        state.apply(Vitals(3, 7, device_memory_bytes=device * GIB, host_memory_bytes=host * GIB, **memory_of))
        said.append([finding.subject.split()[0] for finding in memory.check(state, 0.0) or []])
    assert said == [[], ["devices", "host"], ["devices", "host"], []]
    assert memory.check(state, 0.0) is None, "one reading counts once"


def test_devices_with_little_memory_left_are_one_alert() -> None:
    state = run_of()
    for rank, used in enumerate((77, 79, 78)):
        state.apply(Vitals(rank, 7, device_memory_bytes=used * GIB, device_memory_total=80 * GIB))
    (finding,) = Memory().check(state, 0.0) or []
    assert finding.ranks == (1, 0, 2) and finding.evidence == {"share": 0.988}
    assert finding.text.startswith("3 devices have little memory left: the device of rank 1 (")
    assert finding.text.endswith(" has 99 % of its 80.0 GiB of memory in use")


def test_missing_data_is_not_a_finding() -> None:
    state = run_of()
    state.apply(Vitals(3, 7))
    assert Memory().check(state, 0.0) == Throttle().check(state, 0.0) == []


def test_a_power_cap_that_hardly_lowers_the_clock_is_no_alert() -> None:
    """A healthy GPU runs at 1980 MHz without load; under load it reports a power cap, and runs at 1965 MHz."""
    state, throttle = run_of(), Throttle()
    for sm_mhz, reasons, alerts in (
        (1980, [], 0),
        (1965, ["power cap"], 0),
        (1700, ["power cap"], 1),
        (None, ["power cap"], 1),
        (1965, ["power cap", "thermal"], 1),
    ):
        state.apply(Vitals(0, 7, sm_mhz=sm_mhz, throttle=reasons))
        found = throttle.check(state, 0.0)
        assert found is not None and len(found) == alerts, sm_mhz
    state.apply(Vitals(1, 7, sm_mhz=1980, throttle=[]))
    state.apply(Vitals(0, 7, sm_mhz=1500, throttle=["power cap"]))
    (found,) = Throttle().check(state, 0.0) or []  # a new hub compares with the other GPUs
    assert found.ranks == (0,)


def test_devices_throttled_by_one_reason_are_one_alert() -> None:
    state = run_of()
    for rank in (2, 5):
        state.apply(Vitals(rank, 7, throttle=["thermal slowdown", "idle"], temperature_c=88.4, power_w=612.0))
    (found,) = Throttle().check(state, 0.0) or []
    assert found.text == "ranks 2, 5: clocks throttled by thermal slowdown (88 °C, 612 W on rank 2)"


# --------------------------------------------------------------------------------------------- hysteresis


class Said:
    """A fake detector that returns the findings in `next`; None means that it has no new data."""

    holds, releases = 2, 3

    def __init__(self) -> None:
        self.next: list[Finding] | None = []

    def check(self, state: RunState, now_s: float) -> list[Finding] | None:
        return self.next


def test_alerts_have_hysteresis_and_are_repeated() -> None:
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


def test_a_failing_detector_is_disabled_and_the_others_continue() -> None:
    class Failing(Said):
        def check(self, state: RunState, now_s: float) -> list[Finding] | None:
            raise ZeroDivisionError

    said = Said()
    watch = Detection([Failing(), said], cpu_s=lambda: 0.0)
    said.next = [Finding("stall", "run", "error", "a")]
    assert [len(watch.check(RunState(), float(second))) for second in range(3)] == [0, 1, 0]
    assert watch.problems == ["the detector Failing failed and is disabled: ZeroDivisionError()"]


def test_checks_are_spaced_by_their_cpu_time() -> None:
    clock = iter([0.0, 0.1] * 100)
    said = Said()
    watch = Detection([said], cpu_s=lambda: next(clock))
    said.next = [Finding("stall", "run", "error", "a")]
    told = [second for second in range(20) if watch.check(RunState(), float(second))]
    # After a check of 0.1 s, the next one is 5 s later, because checks may take 2 % of the time.
    assert told == [5]
    # The CPU time of decoding the records counts too.
    clock = iter([0.0, 0.1] * 100)
    said = Said()
    watch = Detection([said], cpu_s=lambda: next(clock))
    said.next = [Finding("stall", "run", "error", "a")]
    told = [second for second in range(20) if watch.check(RunState(), float(second), spent_s=0.1)]
    assert told == [10]


def test_a_lost_rank_is_found_by_all_detectors_together() -> None:
    state = run_of()
    state.apply(Gone(3, clean=False, text="no message for 5 s: process 7 has ended", process="ended"))
    state.apply(Gone(4, clean=True))
    (alert,) = Detection(all_detectors(), cpu_s=lambda: 0.0).check(state, 0.0)
    assert (
        alert.text == "rank 3 (pp0 dp3) is lost: no message for 5 s: process 7 has ended"
        and alert.ranks == [3]
    )
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
def test_a_silent_rank_is_classified_by_its_process(process: Any, name: str, words: str) -> None:
    state = run_of()
    state.apply(Gone(3, clean=False, text="no message for 5 s", process=process))
    (found,) = Lost().check(state, 0.0)
    assert (found.name, found.text) == (name, f"rank 3 (pp0 dp3) is {words}: no message for 5 s")
    assert state.gone[3].over == (process == "ended"), "only a process that has ended is never heard again"
