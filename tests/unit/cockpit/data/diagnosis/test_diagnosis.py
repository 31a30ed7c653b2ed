"""Tests of the two status lines: each rule of the diagnosis applies in the situation that it is for, and the most
severe problem comes first."""

import math
from collections.abc import Iterable
from typing import Literal

import pytest
from msgspec import structs

import cockpit.data.diagnosis.diagnosis
from agents.protocol import (
    STACKS_FACT,
    Alert,
    Event,
    Experts,
    Gone,
    Hello,
    LayerLoad,
    Pulse,
    Step,
    Summary,
    Traffic,
    Update,
)
from cockpit.data.diagnosis.diagnosis import Level, diagnosis
from cockpit.data.diagnosis.status import status_fields, status_word
from cockpit.data.diagnosis.status_lines import status_lines
from cockpit.data.link import LinkState, PlaybackPosition
from cockpit.data.store import Store, Topic
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.status import diagnosis_lines
from tests.screens.fake_run import FakeRun

COLOURS = palette("cockpit-dark")

LOST = [Gone(5, clean=False, text="killed by signal 9", process="ended")]
LONG = [Pulse(6, 9, "tp all-gather, layer 2, micro-batch 1", 31_000.0)]
STALLED = [*LONG, Alert("stall", "run", "error", True, 9, 0.0, "the run is stuck at step 9", {}, [6])]
HOT = [  # in all of the newest steps, because a single hot step may be chance
    *(
        structs.replace(one, load_max_over_mean=6.4)
        for one in FakeRun().story(10)
        if isinstance(one, Summary)
    ),
    Experts(9, [LayerLoad(1, [800, 50, 50, 50, 50, 0, 0, 0], 0)]),
]
ALARM = [Alert("nan", "run", "error", True, 9, 0.0, "loss is nan at step 9")]
NOTICE = [Alert("straggler", "rank 6", "warning", True, 9, 0.0, "rank 6 has an own time of 90 ms", {}, [6])]
DROPS = [Alert("drops", "run", "warning", True, 9, 0.0, "layer 1 drops 5.0 % of its tokens")]


def store_with(run: FakeRun, extra: Iterable[Update] = (), age_s: float = 0.1) -> Store:
    store = Store(lambda: 100.0)
    store.apply(run.story(10))
    store.apply(extra)
    store.set_message_age(age_s)
    return store


@pytest.mark.parametrize(
    ("extra", "level", "words"),
    [
        (NOTICE, Level.WARN, "rank 6 has an own time of 90 ms"),
        (LOST, Level.BAD, "rank 5 (pp1 dp0 tp1 ep1) lost: killed by signal 9 · since step 9"),
        (STALLED, Level.BAD, "the run is stuck at step 9"),
        (HOT, Level.WARN, "expert 0 of layer 1 carries 6.4× its share"),
        (DROPS, Level.WARN, "layer 1 drops 5.0 % of its tokens · try a higher capacity_factor, or none"),
        ([*HOT, *NOTICE, *LOST], Level.BAD, "rank 5"),
        ([*HOT, *NOTICE, *ALARM, *STALLED], Level.BAD, "loss is nan at step 9"),
        ([*HOT, *NOTICE], Level.WARN, "rank 6 has an own time of 90 ms"),
    ],
)
def test_diagnosis(extra: list[Update], level: Level, words: str) -> None:
    found = diagnosis(store_with(FakeRun(oversubscribed=False), extra))
    assert found.level is level
    assert words in found.sentence


def test_shared_cores_come_first_and_no_bubble_advice_is_given() -> None:
    found = diagnosis(store_with(FakeRun()))
    assert found.sentence == "8 ranks share 2 cores: bubbles and times are not those of a cluster"
    with_finding = diagnosis(store_with(FakeRun(), HOT))
    assert with_finding.sentence.startswith("8 ranks share 2 cores")
    assert with_finding.text.endswith("its share")
    assert diagnosis(store_with(FakeRun(), LOST)).sentence.startswith("rank 5")


def test_shared_cores_are_reported_in_a_recording_too() -> None:
    store = store_with(FakeRun())
    store.playback_position = PlaybackPosition(5.0, 0.0, 10.0, 1.0, paused=True, thinned=False)
    assert store.link is LinkState.PLAYBACK
    assert diagnosis(store).sentence == "8 ranks share 2 cores: bubbles and times are not those of a cluster"


def test_a_diagnosis_is_computed_once_for_all_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Store] = []
    rules = (lambda store: made.append(store), *cockpit.data.diagnosis.diagnosis.RULES)
    monkeypatch.setattr(cockpit.data.diagnosis.diagnosis, "RULES", rules)
    now = 100.0
    store = Store(lambda: now)
    store.apply(FakeRun().story(10))
    for _ in range(8):
        diagnosis(store)
    assert len(made) == 1
    store.apply(FakeRun().step(10))
    diagnosis(store)
    store.refused = "no"
    assert diagnosis(store).sentence == "no" and len(made) == 3
    now += 1.0
    diagnosis(store)
    assert len(made) == 4, "some rules depend on the clock"


def test_a_loss_that_is_not_finite_is_bad() -> None:
    store = store_with(FakeRun())
    summary = store.summary
    assert summary
    store.apply([structs.replace(summary, step=10, loss=math.nan)])
    found = diagnosis(store)
    assert found.level is Level.BAD
    assert "since step 10" in found.sentence
    store.apply(structs.replace(summary, step=step, loss=math.nan) for step in range(11, 5000))
    assert "since step 10" in diagnosis(store).sentence, "long before the newest summaries"
    store.apply([structs.replace(summary, step=5000, loss=2.0)])
    assert "loss is" not in diagnosis(store).sentence


def test_stalls_and_stragglers_come_only_from_alerts_of_the_hub() -> None:
    """The cockpit has no thresholds of its own for stalls and stragglers: without an alert, it does not report a slow
    rank, or a rank that has long been in one operation, as a problem."""
    store = store_with(FakeRun(oversubscribed=False), LONG)
    assert status_word(store)[0] == "LIVE" and "rank" not in diagnosis(store).sentence
    store.apply(STALLED)
    assert status_word(store) == ("STALLED", Level.BAD)
    assert diagnosis(store).rank == 6
    store.apply([structs.replace(STALLED[1], active=False)])
    assert status_word(store)[0] == "LIVE"


def test_a_stall_is_explained_by_the_stacks_that_the_hub_has_collected_since() -> None:
    store = store_with(FakeRun(oversubscribed=False), STALLED)
    facts = {STACKS_FACT: 8, "odd": 1, "rank": 6}
    text = "7 of 8 ranks wait in all_reduce (train.py:22); rank 6 is in save (train.py:7)"
    store.apply([Event(-1.0, "warning", "hub", text, facts)])
    assert "py-spy" in diagnosis(store).advice, "the stacks of an earlier stall"
    store.apply([Event(1.0, "warning", "hub", text, facts | {"odd": 0})])
    assert "py-spy" in diagnosis(store).advice, "no rank differs"
    store.apply([Event(2.0, "warning", "hub", text, facts)])
    expected = "rank 6 is in save (train.py:7); 7 of 8 ranks wait in all_reduce (train.py:22)"
    assert diagnosis(store).text == f"the run is stuck at step 9: {expected}" and diagnosis(store).rank == 6


def test_a_run_that_is_still_loading_is_not_waiting_for_ranks() -> None:
    store = Store()
    store.unanswered = True
    assert diagnosis(store).text == "waiting for the run's hub to answer"
    store.unanswered, store.loading = False, (3, 14)
    store.revisions[Topic.RANKS] += 1
    assert diagnosis(store).text == "the state of the run is loading: 3 of 14 parts received"
    store.loading = None
    store.revisions[Topic.RANKS] += 1
    assert diagnosis(store).text == "waiting for the first rank to join"


def test_a_stale_state_blames_no_rank() -> None:
    store = store_with(FakeRun(), age_s=12.0)
    assert status_word(store) == ("STALE 12 s", Level.WARN)
    assert "no message from the hub" in diagnosis(store).sentence


def test_a_state_that_is_older_than_its_last_message_is_not_called_live() -> None:
    store = store_with(FakeRun(oversubscribed=False))
    for behind_s, word in ((1.0, "LIVE"), (2.5, "CATCHING UP")):
        store.set_message_age(0.1, behind_s)
        assert status_word(store)[0] == word


def test_an_ended_run_shows_its_last_step() -> None:
    store = store_with(FakeRun(steps=10), [Gone(rank, clean=True) for rank in range(8)])
    assert status_word(store)[0] == "ENDED"
    assert diagnosis(store).sentence.startswith("the run is over: 10 of 10 steps")


def test_a_run_before_its_first_step_has_no_finding() -> None:
    """The hub was killed and restarted; the ranks have joined again, but nothing else is known about the run yet."""
    store = store_with(FakeRun())
    store.rebuild(FakeRun().begin())
    assert status_word(store) == ("LIVE", Level.NOTE)
    assert diagnosis(store).sentence == "8/8 ranks have joined; no step is done yet"


@pytest.mark.parametrize(
    ("process", "headline"), [("stopped", "RANK SUSPENDED"), ("ended", "RANK LOST"), ("alive", "RANK SILENT")]
)
def test_the_headline_names_the_state_of_the_rank(
    process: Literal["stopped", "ended", "alive"], headline: str
) -> None:
    store = store_with(FakeRun(), [Gone(5, clean=False, text="why", process=process)])
    assert diagnosis(store).headline == headline


def test_a_long_badge_shortens_words_and_keeps_figures() -> None:
    """On a terminal of 80 columns, the loss and the number of reporting ranks stay visible beside a long state of the
    run, LIVE · SLOW RANK, and the label SIMULATED."""
    store = store_with(FakeRun(oversubscribed=False, steps=15_000), NOTICE)
    hellos = [
        structs.replace(one, simulated=True, facts={**one.facts, "speed": 10})
        for one in store.state.hellos.values()
    ]
    store.apply(hellos)

    def line(width: int) -> str:
        return status_lines(store, 1, width)[0][1]

    whole, at_80 = line(250), line(80)
    loss = next(part for part in whole.split(" · ") if part.startswith("loss "))
    assert "LIVE · SLOW RANK" in whole and "SIMULATED x10" in whole and "ranks" in whole
    assert len(at_80) <= 80 and "SLOW RANK" in at_80 and "SIMULATED" in at_80
    assert {"10/15 000", loss, "8/8"} <= set(at_80.split(" · "))
    assert "SIMULATED" in line(30) and "SLOW RANK" in line(30)


def test_the_status_line_sums_up_the_run() -> None:
    text = " · ".join(item.text for item in status_fields(store_with(FakeRun()), operator=True))
    for word in (
        "demo",
        " 10/300 steps",
        "ms/step",
        "tok/s",
        "loss 4.9",
        "8/8 ranks",
        "OPERATOR",
        "0.1 s old",
    ):
        assert word in text
    assert "MFU" not in text  # an unknown value is not shown as a number


def test_an_error_of_the_source_comes_first() -> None:
    store = store_with(FakeRun(), LOST)
    store.source_error = "the engine ended with exit 1: out of memory\x1b[2J"
    assert diagnosis(store).sentence == "the engine ended with exit 1: out of memory [2J"


@pytest.mark.parametrize(
    ("previews", "advice"),
    [
        (False, "cockpit try micro_batches=8 measures whether more helps"),
        (True, "cockpit advise previews larger numbers"),
    ],
)
def test_bubble_advice_names_a_number_only_without_previews(previews: bool, advice: str) -> None:
    found = diagnosis(store_with(FakeRun(oversubscribed=False, slow_rank=None, previews=previews)))
    assert (found.level, found.text[:12]) == (Level.WARN, "bubble-bound")
    assert found.sentence.endswith(f"with 4 micro-batches · {advice}")


def test_advice_that_a_trial_refuted_is_not_repeated() -> None:
    run = FakeRun(oversubscribed=False, slow_rank=None, previews=False)
    measured: dict[str, object] = {"ratio": 2.9, "low": 2.7, "high": 3.1, "before": {"micro_batches": 4}}
    found = diagnosis(store_with(run, [run.trial("t", "reverted", 8, **measured)])).sentence
    assert "try micro_batches" not in found
    assert found.endswith(
        "a trial of micro_batches 4→8 was not faster: step time +190.0 % (95 %: +170.0 % to +210.0 %)"
    )
    for other in (
        # an operator reverted this trial before it had measured
        run.trial("t", "reverted", 8, before={"micro_batches": 4}),
        run.trial("t", "reverted", 2, **measured),
        run.trial("t", "reverted", 16, **(measured | {"before": {"micro_batches": 8}})),
        run.trial("t", "kept", 8, **measured),
    ):
        assert "try micro_batches=8" in diagnosis(store_with(run, [other])).sentence


@pytest.mark.parametrize(
    ("exposed_ms", "level"), [(20.0, Level.GOOD), (150.0, Level.NOTE), (300.0, Level.WARN)]
)
def test_waiting_is_not_shown_as_good(exposed_ms: float, level: Level) -> None:
    store = store_with(FakeRun(oversubscribed=False))
    summary = store.summary
    assert summary
    store.apply([structs.replace(summary, step=10, bubble=None)])
    waits = {"dp": Traffic(1, exposed_ms, exposed_ms)}
    for step in range(10, 20):
        store.apply(
            structs.replace(record, step=step, step_ms=412.0, comm=waits)
            for record in list(store.state.steps.values())
        )
    found = diagnosis(store)
    assert found.level == level and f" {100 * exposed_ms / 412:.0f} %" in found.sentence
    assert ("cockpit advise" in found.sentence) == (level == Level.WARN)


@pytest.mark.parametrize(("zero", "advice"), [(3, "zero 2 needs more memory"), (2, "a larger batch")])
def test_exposed_reductions_are_not_answered_by_the_value_in_force(zero: int, advice: str) -> None:
    store = store_with(FakeRun(oversubscribed=False))
    summary = store.summary
    assert summary
    slow, knobs = {"dp": Traffic(1, 300.0, 300.0)}, {**summary.knobs, "zero": zero}
    store.apply(structs.replace(summary, step=10 + n, bubble=None, comm=slow, knobs=knobs) for n in range(8))
    found = diagnosis(store)
    assert found.cause == "dp" and found.advice.startswith(advice)


def test_a_failed_run_is_not_shown_as_good() -> None:
    gone = [Gone(rank, clean=True) for rank in range(8)]
    assert diagnosis(store_with(FakeRun(steps=10), gone)).level is Level.GOOD
    assert diagnosis(store_with(FakeRun(steps=100), gone)).level is Level.NOTE
    store = store_with(FakeRun(steps=10), gone)
    last = store.summary
    assert last
    store.apply([structs.replace(last, loss=math.nan)])
    assert diagnosis(store).level is Level.BAD
    store.apply([structs.replace(last, grad_norm=math.inf, skipped=True, loss_scale=1024.0)])
    assert diagnosis(store).level is Level.GOOD
    store.apply([structs.replace(last, grad_norm=math.nan)])
    assert diagnosis(store).level is Level.BAD
    assert diagnosis(store).sentence.endswith(" · gradient norm nan")


def test_an_earlier_failure_is_not_the_cause_of_this_end() -> None:
    before = Event(1.0, "error", "run", "rank 2 was killed by SIGKILL")
    store = store_with(FakeRun(steps=10), [before, *(Gone(rank, clean=True) for rank in range(8))])
    assert diagnosis(store).sentence.startswith("the run is over: 10 of 10")
    ended = "the run has ended without a goodbye"
    store.apply([Gone(rank, False, ended, "ended") for rank in range(8)])
    assert ended in diagnosis(store).sentence and "SIGKILL" not in diagnosis(store).sentence
    store.apply([Event(2.0, "error", "run", "rank 5 failed"), Gone(5, False, "rank 5 failed", "ended")])
    assert diagnosis(store).sentence == "rank 5 failed"


def test_no_phase_takes_more_than_a_whole_step() -> None:
    """In a loop that uses `agents.join`, the vote takes place after the reported step, so it can take longer than the
    step."""
    store = Store(lambda: 100.0)
    store.apply([Hello(1, "r", 0, 1, {"dp": 0}, "n", 1, "cpu", "d", 0, 0, True)])
    store.apply([Step(0, 5, 1, 0, 2.0, {"forward": 2.0, "agree": 6.0}, None, {})])
    store.set_message_age(0.1)
    assert diagnosis(store).sentence.startswith("agree takes 75 % of a step")


def test_a_loop_that_reports_no_traffic_has_no_share_of_it() -> None:
    run = FakeRun(oversubscribed=False)
    quiet = [
        structs.replace(one, comm={}, bubble=None) if isinstance(one, Step | Summary) else one
        for one in run.story(10)
        if not isinstance(one, Experts)
    ]
    store = Store()
    store.apply(quiet)
    store.set_message_age(0.1)
    assert diagnosis(store).sentence == "backward takes 51 % of a step"
    store.rank_records = False
    store.state.steps.clear()
    store.revisions.update(Topic)
    assert diagnosis(store).sentence == "a step takes 417 ms"


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_a_next_step_that_would_be_cut_off_has_its_own_line(width: int) -> None:
    store = store_with(FakeRun(oversubscribed=False), DROPS)
    found = diagnosis(store)
    lines = [line.strip(width, COLOURS.text) for line in diagnosis_lines(store, width, COLOURS)]
    whole = " ".join(line.text.strip() for line in lines)
    assert all(line.cell_length == width for line in lines)
    assert found.advice in whole and "…" not in whole
    assert len(lines) == (1 if len(found.sentence) + 3 <= width else 2)


@pytest.mark.parametrize(("width", "most"), [(80, 3), (80, 4)])
def test_a_long_finding_is_shortened_before_the_next_step(width: int, most: int) -> None:
    """On a terminal of 80 columns, a finding of three lines would leave no room for the advice."""
    text = f"rank 6 (pp1 dp1 tp0 ep2) has an own time of 90 ms a step, {'slow ' * 22}"
    slow = structs.replace(NOTICE[0], since_step=4, text=text)
    store = store_with(FakeRun(oversubscribed=False), [slow])
    found = diagnosis(store)
    lines = [
        line.strip(width, COLOURS.text).text.strip() for line in diagnosis_lines(store, width, COLOURS, most)
    ]
    assert lines[-1] == f"→ {found.advice}" and lines[-2].endswith("…" if most == 3 else "step 4")
    assert len(lines) == most and all(len(line) <= width - 3 for line in lines[1:])


def test_a_recording_without_ranks_says_whether_it_is_damaged() -> None:
    store = Store(lambda: 0.0)
    store.playback_position = PlaybackPosition(5.0, 0.0, 9.0, 1.0, True, False)
    assert diagnosis(store).sentence == "no rank had joined at this time"
    store.apply([Event(5.0, "error", "recording", "incomplete: run.db is damaged")])
    found = diagnosis(store)
    assert found.level is Level.WARN and "the recording is damaged" in found.sentence
    assert "8 Log" in found.advice


def test_a_gradient_that_is_not_finite_is_not_called_a_loss() -> None:
    text = "gradient norm is nan at step 9 on rank 3 (dp3)"
    for alert, headline in (
        (ALARM[0], "LOSS NOT FINITE"),
        (structs.replace(ALARM[0], text=text), "GRADIENT NOT FINITE"),
    ):
        assert diagnosis(store_with(FakeRun(oversubscribed=False), [alert])).headline == headline
