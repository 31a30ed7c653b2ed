"""The layout of a live run is changed, and ranks are killed and come back: the losses equal those of an uninterrupted
run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import psutil
import pytest

from tests.ranks.driver import eventually
from tests.ranks.launch.test_run import run
from tests.ranks.parity.comparison import FP64_TOLERANCE
from tests.ranks.program import Program
from tests.unit.cockpit.schemas import check

# The model is small, so that a step takes a few milliseconds. There are two stages with two ranks each.
SMALL = ["model.layers=2", "model.seq_len=16", "model.d_model=32", "model.moe.d_expert=32", "train.warmup=4"]
SMALL += ["train.global_batch=8", "checkpoint.every=3"]
FOUR_RANKS = [*SMALL, "grid.tp=1", "grid.ep=2", "knobs.micro_batches=2"]
ONE_RANK = [*SMALL, "grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "knobs.micro_batches=1"]

Event = dict[str, Any]


class Run:
    """A run of `tests.ranks.checkpoint.relaid` in the background; its events are read one by one. A thread reads its
    output all the time, because a run whose output is not read stops when the pipe is full, after about 60 steps."""

    def __init__(self, folder: Path, *words: str):
        self.folder, self.events = folder, list[Event]()
        self._errors = (folder.parent / f"{folder.name}.stderr").open("w+")
        module = ("-W", "ignore", "-m", "tests.ranks.checkpoint.relaid")
        self.process = Program(*module, str(folder), *words, errors=Path(self._errors.name))
        self._lines = SimpleQueue[str]()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")  # the end

    def until(self, holds: Callable[[Event], object]) -> Event:
        for line in iter(self._lines.get, ""):
            self.events.append(json.loads(line))
            if holds(self.events[-1]):
                return self.events[-1]
        raise AssertionError(f"the run ended before that: {self.errors}")

    def until_step(self, step: int) -> Event:
        return self.until(lambda event: event.get("event") == "step" and event["step"] >= step)

    @property
    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    @property
    def ranks(self) -> list[psutil.Process]:
        """The rank processes. They are forks of the command, so they have its command line; the hub, also a child
        process, has a different one."""
        parent = psutil.Process(self.process.pid)
        return [child for child in parent.children() if child.cmdline() == parent.cmdline()]

    def kill_a_rank(self, number: int) -> None:
        os.kill(self.ranks[number].pid, signal.SIGKILL)

    def rest(self) -> int:
        self.events += [json.loads(line) for line in iter(self._lines.get, "")]
        return self.process.wait(60)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step; if a step was trained again, its last loss."""
        return {event["step"]: event["loss"] for event in self.of_kind("step")}

    def cockpit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([sys.executable, "-m", "cockpit", arguments[0], "--run", str(self.folder), *arguments[1:]])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self._errors.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(name: str, *words: str) -> Run:
        runs.append(Run(tmp_path / name, *words))
        return runs[-1]

    yield begin
    for one in runs:
        one.close()


def assert_nothing_lost(run: Run, whole: Run) -> None:
    assert run.losses.keys() == whole.losses.keys(), run.errors
    for step, loss in whole.losses.items():
        assert abs(run.losses[step] - loss) < FP64_TOLERANCE * abs(loss), step


def test_relayout_shrink_and_grow_equal_an_uninterrupted_run(start: Callable[..., Run]) -> None:
    steps = "train.steps=160"  # on a busy machine, a cockpit command takes as long as dozens of steps
    whole = start("whole", *ONE_RANK, steps)
    run = start("run", *FOUR_RANKS, steps, "elastic.restarts=1", "elastic.on_loss=shrink")
    run.until_step(1)
    asked = run.cockpit(
        "relayout", "grid.pp=1", "grid.dp_shard=4", "grid.ep=4", "--reason", "memory", "--json"
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    preview, relaid = map(json.loads, asked.stdout.splitlines())
    check("relayout", preview, relaid)
    assert {"peak_bytes"} <= {one["quantity"] for one in preview["estimates"] if one["after"] is not None}
    assert relaid["state"] == "applied" and relaid["lost_steps"] == 0 and relaid["world"] == 4
    assert relaid["before"] == "grid.pp=2 grid.dp_shard=2 grid.ep=2 knobs.micro_batches=2"
    again = run.until(lambda event: event["event"] == "restarted")
    assert again["cause"] == "relayout" and again["step"] == relaid["step"] and again["lost_s"] > 0

    run.until_step(again["step"] + 4)
    run.kill_a_rank(2)
    killed = run.until(lambda event: event["event"] == "restart" and event["cause"] == "failure")
    assert killed["world"] == 2 and "grid.dp_shard 4 -> 2" in killed["why"] and "rank 2" in killed["why"]
    back = run.until(lambda event: event["event"] == "restarted" and event["cause"] == "failure")
    done = max(event["step"] for event in run.of_kind("step")[:-1]) + 1
    assert (back["lost_steps"] >= done - back["step"] - 1 and back["step"] % 3 == 0) or back["step"] == again[
        "step"
    ]
    run.until_step(back["step"] + 4)
    asked = run.cockpit("relayout", "grid.dp_shard=4", "grid.ep=4", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    grown = json.loads(asked.stdout.splitlines()[-1])
    assert grown["state"] == "applied" and grown["lost_steps"] == 0 and grown["world"] == 4
    run.until_step(grown["step"] + 4)
    log = run.cockpit("log").stdout
    assert f"lost {back['lost_s']:.1f} s and {back['lost_steps']} step" in log and "memory" in log
    check("engine-run", again, killed, back, *run.of_kind("checkpoint")[:1])
    assert run.rest() == 0, run.errors
    assert whole.rest() == 0, whole.errors
    assert_nothing_lost(run, whole)


@pytest.mark.exhaustive
def test_a_relayout_after_a_resume_reports_its_own_restart(start: Callable[..., Run]) -> None:
    """The recording has the restart of the first launcher, which was restart 1 too."""
    words = [*SMALL, "grid.pp=1", "grid.dp_shard=2", "grid.tp=1", "grid.ep=1", "train.steps=100000"]
    run = start("run", *words)
    run.until_step(1)
    asked_s = time.time()
    assert run.cockpit("relayout", "grid.dp_shard=1", "grid.tp=2").returncode == 0
    began_s = json.loads(run.cockpit("info", "--json").stdout)["run"]["began"]
    assert began_s < asked_s, "a restart of the ranks does not begin the run again"
    run.process.terminate()
    assert run.rest() == 0, run.errors
    run = start("run", *words, "--resume")
    run.until_step(1)
    asked = run.cockpit("relayout", "grid.dp_shard=1", "grid.tp=2", "--json")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    relaid = json.loads(asked.stdout.splitlines()[-1])
    again = run.until(lambda event: event["event"] == "restarted")
    assert (relaid["restart"], relaid["step"], relaid["revision"]) == (1, again["step"], again["revision"])


@pytest.mark.exhaustive
def test_an_illegal_layout_changes_nothing(start: Callable[..., Run]) -> None:
    run = start("run", *SMALL, "grid.pp=1", "grid.dp_shard=2", "grid.tp=1", "grid.ep=1", "train.steps=100000")
    run.until_step(1)
    for words, why in (
        (["grid.tp=3"], "grid.tp = 3 does not divide model.heads = 4"),
        (["model.layers=4"], "cannot change while a run is live"),
        (["grid.dp_shard=2"], "the run already has this layout"),
    ):
        asked = run.cockpit("relayout", *words)
        assert (asked.returncode, asked.stderr) == (3, "") and why in asked.stdout, asked.stdout
        assert len(asked.stdout.splitlines()) == 1
    assert not run.of_kind("restart")


@pytest.mark.exhaustive
def test_a_crash_loop_ends(start: Callable[..., Run]) -> None:
    run = start("run", *SMALL, "grid.pp=1", "grid.dp_shard=2", "grid.tp=1", "grid.ep=1", "train.steps=100000",
                "elastic.restarts=9")  # fmt: skip
    for _ in range(3):
        run.until(lambda event: event["event"] == "start")
        eventually(lambda: len(run.ranks) == 2)  # rank 0 may report this before rank 1 is forked
        run.kill_a_rank(1)
    assert run.rest() == 1
    assert "the run ends: 3 consecutive starts failed before they had trained a step" in run.errors


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_twenty_kills_lose_only_the_steps_since_the_checkpoint(start: Callable[..., Run]) -> None:
    dice, kills = random.Random(14), 20
    steps = "train.steps=130"
    whole = start("whole", *ONE_RANK, steps)
    assert whole.rest() == 0, whole.errors
    run = start("run", *FOUR_RANKS, steps, f"elastic.restarts={kills}")
    run.until_step(1)
    for kill in range(1, kills + 1):
        run.until_step(max(run.losses) + dice.randint(0, 4))
        newest = max(run.losses)
        run.kill_a_rank(dice.randrange(4))
        back = run.until(lambda event, kill=kill: event["event"] == "restarted" and event["number"] == kill)
        assert back["step"] % 3 == 0 and back["cause"] == "failure"
        assert back["lost_steps"] <= 6, "a checkpoint every 3 steps, and one being written"
        assert back["step"] + back["lost_steps"] >= newest
    assert run.rest() == 0, run.errors
    assert [event["number"] for event in run.of_kind("restarted")] == list(range(1, kills + 1))
    assert_nothing_lost(run, whole)
