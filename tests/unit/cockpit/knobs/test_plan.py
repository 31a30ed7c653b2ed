"""What-if planning without a screen: legal changes to a layout, the fit to measured steps, and the worker thread."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.style import Style

from agents.protocol import Changes, Value
from cockpit.cli.steer.advise import ranked_rows
from cockpit.data.store import Store
from cockpit.knobs.plan.model import WhatIf
from cockpit.knobs.plan.outlook import Planner, bubble_bound
from cockpit.knobs.plan.run import Basis, Measured, Reported, Steps
from cockpit.knobs.plan.settings import BY_NAME, SETTINGS, changed, legal_values, overrides
from cockpit.knobs.plan.suggestions import Suggestions, advised, suggestions
from cockpit.knobs.plan.worker import Answer, Worker
from cockpit.tui.drawing.theme import palette
from cockpit.tui.widgets.plan.advice import ranked_lines
from engine.config.knob_values import with_knobs
from engine.config.refusal import LayoutError
from engine.config.toml import load
from engine.planner.advice import Evidence
from engine.planner.hardware.table import hardware
from engine.planner.timing.predict import predict
from engine.planner.workload.job import Job
from tests.screens.planned_run import PlannedRun, large_layout

MACHINE = hardware("A100-80")
REPORTED = Reported((), "", "NVIDIA A100-SXM4-80GB", "", 8, False, (("micro_batches", 4),), None, "")


NOTHING = Measured()


def planner(measured: Measured = NOTHING, reported: Reported = REPORTED) -> Planner:
    return Planner(reported, Basis(large_layout(), MACHINE, False), measured)


@pytest.mark.parametrize("name", ["demo", "frontier/deepseek-v3", "frontier/llama3-405b"])
def test_every_offered_value_is_legal_and_its_arguments_give_the_same_layout(name: str) -> None:
    layout = load(f"layouts/{name}.toml")
    offered = 0
    for setting in SETTINGS:
        if not setting.applies(layout):
            continue
        values = legal_values(layout, {}, setting)
        assert setting.get(layout) in values
        for value in values:
            if value == setting.get(layout):
                continue
            new = changed(layout, {setting.name: value})
            arguments = overrides(layout, new.layout)
            assert load(f"layouts/{name}.toml", arguments) == new.layout or "split" in str(
                layout.plan.split
            ), arguments
            if setting.name != "ranks":
                assert new.layout.ranks.world == layout.ranks.world
            offered += 1
    assert offered > 20


def test_what_follows_from_a_change_is_named() -> None:
    layout = load("layouts/demo.toml", ["knobs.micro_batches=16"])
    new = changed(layout, {"tp": 1})
    assert new.follows == {"dp_shard": (2, 4), "micro_batches": (16, 8)}
    with pytest.raises(LayoutError, match="does not divide"):
        changed(layout, {"micro_batches": 3})


@pytest.mark.parametrize(("m", "idle"), [(2, 1 / 3), (4, 1 / 5), (8, 1 / 9), (16, 1 / 17)])
def test_the_bound_of_1f1b_is_the_textbook_formula(m: int, idle: float) -> None:
    job = Job.of(changed(load("layouts/demo.toml"), {"micro_batches": m}).layout)
    assert bubble_bound(job) == pytest.approx(idle)


def test_times_are_fitted_to_the_steps_of_the_run() -> None:
    """If computation and communication take 1.5 times as long as planned, the fit recovers this factor from the
    steps."""
    layout = large_layout()

    def truth(m: int) -> float:
        job = Job.of(with_knobs(layout, {"micro_batches": m}))
        return 1.5 * predict(job, MACHINE).step_s[1]

    def steps(m: int) -> Steps:
        return Steps(
            (("micro_batches", m),), tuple(truth(m) * (1 + 0.002 * (-1) ** n) for n in range(40)), None
        )

    alone, fitted = planner(), planner(Measured((steps(4), steps(8))))
    span = fitted.outlook({"micro_batches": 16}).step_s
    assert span and span.low < truth(16) < span.high
    assert span.likely == pytest.approx(truth(16), rel=0.02)
    raw = alone.outlook({"micro_batches": 16}).step_s
    assert raw and raw.likely == pytest.approx(truth(16) / 1.5, rel=0.02)
    assert "fitted to 2 settings" in fitted.outlook({}).source and "alone" in alone.outlook({}).source
    tp = fitted.outlook({"tp": 1})
    assert tp.step_s and "published runs" in tp.source, "the fit has not seen another grid"
    assert tp.step_s.high / tp.step_s.low > span.high / span.low


def test_on_shared_cores_memory_is_planned_but_no_times() -> None:
    found = planner(reported=replace(REPORTED, shared=True)).outlook({"recompute": "full"})
    assert found.step_s is None and found.bubble is None and found.mfu is None and "share cores" in found.why
    assert found.memory.peak < planner().outlook({}).memory.peak


def test_advice_separates_live_changes_and_leaves_out_with_reasons() -> None:
    tried: list[tuple[dict[str, Value], str]] = [({"micro_batches": 8}, "step time +1.0 %")]
    live: list[Changes] = [{"micro_batches": 2}, {"micro_batches": 8}, {"micro_batches": 16}]
    found = suggestions(planner(), Evidence(1000.0, bubble=0.2), live, tried)
    words = [one.candidate.words for one in found.live.ranked]
    assert all(word.startswith("micro_batches=") for word in words)
    assert any("micro_batches=8 is left out: a trial" in text for text in found.live.left_out)
    assert not any("micro_batches" in one.candidate.words for one in found.restart.ranked)
    assert any("does not fit: " in text for text in (*found.live.left_out, *found.restart.left_out))
    gains = [one.likely for one in found.restart.ranked]
    assert gains == sorted(gains, reverse=True) and all(gain > 0 for gain in gains)
    assert set(BY_NAME) & {word.partition("=")[0] for word in found.peaks}


def test_advise_and_the_plan_screen_show_the_same_changes(tmp_path: Path) -> None:
    store = Store(lambda: 100.0)
    store.apply(PlannedRun(folder=tmp_path, gib=192).story(60, 30))
    model = WhatIf()

    def answer() -> Answer | None:
        model.update(store)
        return model.suggestions(store)

    deadline = time.monotonic() + 60
    while (found := answer()) is None or not found.fresh:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    on_screen: Suggestions = found.value
    headless = advised(store)
    assert headless is not None and headless == on_screen.live and headless.ranked
    _, *rows = ranked_rows(headless)
    lines = ranked_lines(on_screen.live, on_screen.peaks, 100, palette("cockpit-dark"))
    for place, (row, line) in enumerate(zip(rows, lines, strict=True), start=1):
        words, interval, likely, _ = row
        text = " ".join(line.strip(100, Style()).text.split())
        assert text.startswith(f"{place} {words} {interval} ({likely})"), text


def test_the_worker_answers_the_newest_question_first_and_marks_old_answers() -> None:
    worker, running, gate = Worker(), threading.Event(), threading.Event()
    order: list[str] = []

    def answer(name: str) -> str:
        if name == "first":
            running.set()
            gate.wait(30)
        order.append(name)
        return name

    worker.ask("first", lambda: answer("first"))
    assert running.wait(30)
    for name in ("old", "new"):
        assert worker.ask(name, lambda name=name: answer(name)) is None  # type: ignore[misc]
    worker.ask("later", lambda: answer("later"), later=True)
    gate.set()
    _finish(worker)
    assert order == ["first", "new", "old", "later"]
    stale = worker.ask("new", lambda: answer("newer"), version=1)
    assert stale and stale.value == "new" and not stale.fresh
    _finish(worker)
    fresh = worker.ask("new", lambda: answer("never"), version=1)
    assert fresh and fresh.value == "newer" and fresh.fresh


def test_a_fault_of_the_planner_is_an_answer() -> None:
    worker = Worker()
    worker.ask("fault", lambda: 1 / 0)
    _finish(worker)
    found = worker.ask("fault", lambda: 1)
    assert found and found.refusal == "the planner failed: ZeroDivisionError: division by zero"


def _finish(worker: Worker) -> None:
    thread = worker._thread
    if thread:
        thread.join(60)
    assert not worker.busy


def test_a_missing_folder_is_no_layout(tmp_path: Path) -> None:
    from cockpit.knobs.plan.run import NoLayoutError, basis

    with pytest.raises(NoLayoutError, match=r"has no layout\.toml"):
        basis(replace(REPORTED, folders=(tmp_path,)))
    with pytest.raises(NoLayoutError, match="names no folder"):
        basis(REPORTED)
