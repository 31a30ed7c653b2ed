"""The ten questions of docs/operate/operator.md, each answered in at most three key presses after the app starts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from agents.hub.telemetry.alerting import facts_of
from agents.protocol import Alert, Event, Experts, LayerLoad, Step, Summary, Update
from cockpit.tui.screens.plan import Plan
from tests.screens.conftest import MakeCockpit
from tests.screens.driver import press, screen_text, settle, until
from tests.screens.fake_run import START_S, FakeRun
from tests.screens.planned_run import PlannedRun
from tests.unit.cockpit.cli.test_runs import GONE, record

PAGE = Path("docs/operate/operator.md")
JUMP = 140  # step at which the loss jumps, after the knob change at step 100
DEAD = (2, 5, 120)  # layer, expert, first step without tokens
SLOWEST = 130


@dataclass
class Troubled(FakeRun):
    """A run with a dead expert, a slow step and a jump in the loss."""

    oversubscribed: bool = False
    straggler_alert: bool = True

    def step(self, step: int) -> Iterator[Update]:
        layer, expert, since = DEAD
        for update in super().step(step):
            if isinstance(update, Experts) and step >= since:
                layers = [
                    LayerLoad(
                        one.layer,
                        [0 if (one.layer, n) == (layer, expert) else load for n, load in enumerate(one.load)],
                        one.dropped,
                    )
                    for one in update.layers
                ]
                update = structs.replace(update, layers=layers)
            if isinstance(update, Summary) and update.loss is not None and step >= JUMP:
                update = structs.replace(update, loss=update.loss + 1.5)
            if isinstance(update, Summary) and step == SLOWEST:
                update = structs.replace(update, step_ms=3 * update.step_ms)
            if isinstance(update, Step) and step == SLOWEST:
                phases = {name: 3 * ms for name, ms in update.phases.items()}
                update = structs.replace(update, step_ms=3 * update.step_ms, phases=phases)
            yield update
        if step == JUMP:
            text = f"loss 4.100 at step {JUMP} is far above the usual 2.600"
            alert = Alert("loss_spike", "run", "warning", True, JUMP, START_S + JUMP, text, {}, [], JUMP)
            yield Event(START_S + JUMP, "warning", "hub", text, facts_of(alert))
            yield alert


Make = Callable[[Path], FakeRun]


@dataclass(frozen=True)
class Question:
    """A user's question, the keys to press to find the answer, and regular expressions that the screen must
    then match."""

    text: str
    keys: tuple[str, ...]
    answers: tuple[str, ...]
    run: Make = field(default=lambda _: Troubled())


def planned(folder: Path) -> FakeRun:
    return PlannedRun(folder=folder)


QUESTIONS = (
    Question(
        "Which rank is slow, and why?",
        ("2", "w"),
        (r"r3 pp0 dp1 tp1", r"own time \d+ ms, \+\d+ %", r"backward \+\d+ ms"),
    ),
    Question(
        "What effect would more micro-batches have?",
        ("7", "right"),
        (r"micro_batches +8 → +16", r"step time +[\d. ]+ → ", r"bubble +[\d.]+ → ", r"fits"),
        planned,
    ),
    Question(
        "Which expert is dead, in which layer, since when, and on which ranks?",
        ("4", "w"),
        (r"expert 5 of layer 2|layer 2 .* expert 5|L2.*e5", r"dead", r"since step \d+", r"rank|owner"),
    ),
    Question(
        "How many bytes does each rank send to the others?",
        ("5",),
        (r"All-to-all · rank to rank", r"hottest r\d+ → r\d+", r"\d/8 ranks sampled"),
    ),
    Question(
        "What changed before the loss jumped?",
        ("6", "e"),
        (r"100 ◆ micro_batches 4→8 · ada@login", r"140 .*loss"),
    ),
    Question(
        "How much memory is used, and what would recompute save?",
        ("7", "tab"),
        (r"activations", r"recompute", r"GiB"),
        planned,
    ),
    Question(
        "Which step was the slowest, and what happened in it?",
        ("3", "w"),
        (rf"AT STEP {SLOWEST}", rf"step {SLOWEST} took", r"grew"),
    ),
    Question(
        "Is the run healthy?",
        (),
        (r"^ ! LIVE · SLOW RANK ", r"against the .* ranks with the same work|own time of"),
    ),
    Question(
        "How does it compare with yesterday's run?",
        ("6", "v", "enter"),
        (r"yesterday", r"demo"),
    ),
    Question(
        "What are its settings, and where are its logs?", ("i",), (r"── files ─", r"folder", r"learning rate")
    ),
)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
async def test_question(
    make_cockpit: MakeCockpit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: Question
) -> None:
    monkeypatch.setenv("COCKPIT_RUNS", str(tmp_path / "runs"))
    record(tmp_path / "runs" / "yesterday", *GONE)
    assert len(question.keys) <= 3
    cockpit = make_cockpit(question.run(tmp_path))
    async with cockpit.app.run_test(size=(120, 36)) as pilot:
        await press(cockpit, pilot, *question.keys)
        for screen in cockpit.app.screen_stack:
            if isinstance(screen, Plan):
                model = screen.model
                await until(cockpit.app, pilot, lambda model=model: not model.worker.busy)  # type: ignore[misc]
                await settle(cockpit, pilot)
        shown = screen_text(cockpit)
        for answer in question.answers:
            assert re.search(answer, shown, re.MULTILINE), f"{answer}\n{shown}"


def test_the_page_has_each_question() -> None:
    page = PAGE.read_text()
    assert [line[3:] for line in page.splitlines() if line.startswith("## ")] == [q.text for q in QUESTIONS]
