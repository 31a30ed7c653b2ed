"""Runs the commands `engine run` and `cockpit` as a script would, with real ranks and with faults."""

import gzip
import json
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cockpit.data.experts import owners
from cockpit.data.sources.connection import Connection
from engine.config.toml import load
from tests.ranks.program import ROOT, Program
from tests.ranks.program import run as run_program
from tests.unit.cockpit.schemas import check

DEMO = "layouts/demo.toml"
# Two stages with two ranks each. A step takes a few milliseconds, so that training takes little of the tests' time.
FOUR_RANKS = ["grid.tp=1", "grid.ep=2", "model.layers=2", "model.seq_len=32", "model.d_model=32"]
FOUR_RANKS += ["model.moe.d_expert=48", "train.global_batch=16", "knobs.micro_batches=2"]
TWO_RANKS = ["grid.pp=1", "grid.dp_shard=1", "grid.ep=2", "train.global_batch=8", "knobs.micro_batches=1"]

STEP_FIELDS = {
    "event",
    "step",
    "loss",
    "grad_norm",
    "step_ms",
    "tokens_per_s",
    "mfu",
    "bubble",
    "bubble_bound",
}
STEP_FIELDS |= {"oversubscribed", "a2a_bytes", "comm", "dropped", "load_max_over_mean", "knobs", "revision"}


def engine(*arguments: str) -> list[str]:
    """The arguments of `python` for `engine run`, as `Program` expects them. For a complete command line, put
    `sys.executable` before these arguments."""
    return ["-m", "engine", "run", *arguments]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


class Live:
    """A run in the background. A thread reads its NDJSON output, because a full pipe would stop the run."""

    def __init__(self, run_dir: Path, *arguments: str):
        self.run_dir = run_dir
        self.errors = (run_dir.parent / "stderr").open("w+")
        words = ["-m", "tests.ranks.launch.paced", "run", DEMO, "--json", "--run-dir", str(run_dir)]
        self.process = Program(*words, *arguments, errors=run_dir.parent / "stderr")
        self.events: list[dict[str, Any]] = []
        self.family: list[psutil.Process] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def next_event(self) -> dict[str, Any] | None:
        """Wait for the next line of the output; None at its end."""
        if line := self._lines.get():
            self.events.append(json.loads(line))
        return self.events[-1] if line else None

    def until_step(self, step: int) -> dict[str, Any]:
        while event := self.next_event():
            if event.get("step", -1) >= step:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                return event
        self.errors.seek(0)
        raise AssertionError(f"the run ended before step {step}: {self.errors.read()}")

    def rest(self) -> int:
        while self.next_event():
            pass
        return self.process.wait(60)

    @property
    def steps(self) -> list[int]:
        return [event["step"] for event in self.events if event["event"] == "step"]

    def orphans(self) -> list[psutil.Process]:
        return psutil.wait_procs(self.family, timeout=10)[1]

    def cockpit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        name = arguments[0]
        return run(
            [sys.executable, "-m", "cockpit", name, "--run", str(self.run_dir), *arguments[1:], "--json"]
        )


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    started = Live(tmp_path / "run", *FOUR_RANKS, "train.steps=100000")
    yield started
    if started.process.poll() is None:
        started.process.kill()
    for process in started.family:
        if process.is_running():
            process.kill()


def test_headless_without_a_hub(tmp_path: Path) -> None:
    command = engine(DEMO, "train.steps=4", "--json", "--hub", "none", "--run-dir", str(tmp_path / "run"))
    done = run([sys.executable, *command])
    assert done.returncode == 0, done.stderr
    start, *steps, end = map(json.loads, done.stdout.splitlines())
    check("engine-run", start, *steps, end)
    assert start["event"] == "start" and start["world"] == 8 and start["grid"]["tp"] == 2
    assert [event["step"] for event in steps] == list(range(4))
    for event in steps:
        assert event.keys() >= STEP_FIELDS
        assert event["comm"].keys() == {"dp", "tp", "pp", "ep", "cp", "control"}
        assert 0 < event["a2a_bytes"] <= event["comm"]["ep"]["bytes"]
        assert event["oversubscribed"] == (len(os.sched_getaffinity(0)) < 8)
    assert abs(steps[0]["loss"] - math.log(256)) < 0.1
    assert (start["run"], start["folder"]) == ("run", str(tmp_path / "run"))
    assert end == {
        "event": "end",
        "steps": 4,
        "loss": steps[-1]["loss"],
        "wall_s": end["wall_s"],
        "exit": 0,
        "run": "run",
        "folder": str(tmp_path / "run"),
    }
    log = (tmp_path / "run" / "engine.log").read_text()
    assert log.endswith(done.stdout) and "train.warmup = 40 is longer than train.steps = 4" in log
    assert load(tmp_path / "run" / "layout.toml") == load(ROOT / DEMO, ["train.steps=4"])
    assert "hub.json" not in os.listdir(tmp_path / "run")


@pytest.mark.exhaustive
def test_the_deepseek_layout_trains(tmp_path: Path) -> None:
    """The layout `deepseek-mini` trains on 4 ranks. This layout has a dense layer, a shared expert, expert groups, a
    bias on expert selection and an auxiliary loss."""
    layout = "layouts/deepseek-mini.toml"
    words = engine(layout, "train.steps=3", "--json", "--hub", "none", "--run-dir", str(tmp_path))
    done = run([sys.executable, *words])
    assert done.returncode == 0, done.stderr
    start, *steps, end = map(json.loads, done.stdout.splitlines())
    assert (start["world"], len(steps), end["exit"]) == (4, 3, 0)
    assert steps[2]["loss"] < steps[0]["loss"] < math.log(256) + 0.2
    assert {"bias_rate", "aux_loss_coef", "z_loss_coef"} < steps[0]["knobs"].keys()


def test_steer_a_live_run_and_kill_its_hub(live: Live) -> None:
    live.until_step(2)

    refused = live.cockpit("set", "micro_batches=7")
    assert refused.returncode == 3
    outcome = json.loads(refused.stdout)
    assert outcome["state"] == "rejected" and "2, 4, 8" in outcome["why"]

    applied = live.cockpit("set", "micro_batches=4", "capacity_factor=1.0", "--wait")
    assert applied.returncode == 0, applied.stderr
    outcome = json.loads(applied.stdout)
    assert (outcome["state"], outcome["acks"], outcome["world"]) == ("applied", 4, 4)
    step = live.until_step(outcome["applied_step"])
    assert step["knobs"]["micro_batches"] == 4 and step["dropped"] > 0
    assert step["revision"] == outcome["revision"]
    before = next(e for e in live.events if e.get("step") == outcome["applied_step"] - 1)
    assert before["knobs"]["micro_batches"] == 2 and before["dropped"] == 0

    saved = json.loads(live.cockpit("set", "save", "--wait").stdout)
    assert (saved["state"], saved["acks"]) == ("applied", 4)
    while not (checkpoints := [event for event in live.events if event["event"] == "checkpoint"]):
        live.until_step(live.steps[-1] + 1)
    assert checkpoints[0]["step"] == saved["applied_step"] and checkpoints[0]["why"] is None
    manifest = json.loads((Path(checkpoints[0]["folder"]) / "manifest.json").read_text())
    assert manifest["revision"] == saved["revision"] and manifest["knobs"]["micro_batches"] == 4

    snapshot = json.loads(live.cockpit("snapshot").stdout)
    assert len(snapshot["ranks"]) == 4 and snapshot["coverage"]["reporting"] == 4
    assert {knob["name"]: knob["value"] for knob in snapshot["knobs"]}["micro_batches"] == 4
    for rank in snapshot["ranks"]:  # the 2 ranks of each stage share its experts
        stage = range(rank["rank"] // 2 * 2, rank["rank"] // 2 * 2 + 2)
        assert {to["peer"] for to in rank["peers"]["sent"]} == set(stage) - {rank["rank"]}
        if rank["peers"]["step"] == rank["step"]["step"]:
            assert sum(to["bytes"] for to in rank["peers"]["sent"]) == rank["step"]["a2a_bytes"]

    moved = live.cockpit("set", "expert_placement=load", "--wait")
    assert json.loads(moved.stdout)["state"] == "applied", moved.stdout
    live.until_step(json.loads(moved.stdout)["applied_step"] + 1)
    assert any("experts placed for load" in line for line in live.cockpit("log").stdout.splitlines())
    with Connection(str(live.run_dir)) as connection:
        connection.wait_for_snapshot()
        for cell in ((layer, expert) for layer in range(2) for expert in range(8)):
            (owner,) = owners(connection.store, cell).ranks  # one of the 2 ranks of its stage
            assert owner // 2 == cell[0]

    hub = json.loads((live.run_dir / "hub.json").read_text())
    os.kill(hub["pid"], signal.SIGKILL)
    live.until_step(live.steps[-1] + 4)
    deadline = time.monotonic() + 30
    # Wait until the restarted hub has received the ranks and the knob board again.
    while time.monotonic() < deadline:
        again = live.cockpit("set", "recompute=full", "--wait")
        if again.returncode == 0:
            break
        time.sleep(0.2)
    outcome = json.loads(again.stdout)
    assert outcome["state"] == "applied" and outcome["acks"] == 4, again.stderr
    live.until_step(outcome["applied_step"])
    back = live.cockpit("set", "recompute=none", "--wait")  # "none" is one of this knob's values
    assert json.loads(back.stdout)["state"] == "applied", back.stdout

    live.process.send_signal(signal.SIGTERM)
    assert live.rest() == 0
    assert live.steps == list(range(len(live.steps))), "a step was lost"
    assert live.events[-1]["event"] == "end" and live.events[-1]["exit"] == 0
    assert not live.orphans()


@pytest.mark.exhaustive
def test_profile_of_a_stage(live: Live) -> None:
    live.until_step(2)
    done = live.cockpit("profile", "--ranks", "pp1", "--steps", "2")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    check("profile", record)
    assert (record["ranks"], record["steps"]) == ([2, 3], 2)
    events = json.loads(gzip.decompress(Path(record["file"]).read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 2 (pp1 dp0 tp0 ep0)", "rank 3 (pp1 dp1 tp0 ep1)"]
    first = record["first"]
    steps = [event["name"] for event in events if event["name"].startswith("step ")]
    assert steps == [f"step {first}", f"step {first + 1}"] * 2
    refused = live.cockpit("profile", "--ranks", "pp2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert (
        "profile_rank = pp2 is not legal; legal: all, dp0, dp1, ep0, ep1, pp0, pp1, 0 to 3" in refused.stderr
    )
    refused = live.cockpit("profile", "--steps", "4")
    assert refused.returncode == 3 and "profile = 4 is not legal" in json.loads(refused.stdout)["why"]


def test_a_killed_rank_ends_the_run_with_a_sentence(live: Live) -> None:
    live.until_step(1)
    ranks = [
        p for p in psutil.Process(live.process.pid).children() if "agents.hub" not in " ".join(p.cmdline())
    ]
    assert len(ranks) == 4
    watching = [sys.executable, "-m", "cockpit", "watch", "--run", str(live.run_dir), "--json"]
    watch = subprocess.Popen(watching, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert watch.stdout and watch.stdout.readline(), "the watcher has connected"
    ranks[3].kill()
    killed = time.monotonic()
    assert live.rest() == 1
    seen, _ = watch.communicate(timeout=20)
    assert watch.returncode == 1
    deaths = [
        line for line in seen.splitlines() if '"event"' in line and "rank 3 (pp1 dp1 tp0) was killed" in line
    ]
    assert deaths, "a subscriber gets the event that names the dead rank"
    assert time.monotonic() - killed < 20
    live.errors.seek(0)
    sentence = live.errors.readline()
    assert "rank 3 (pp1 dp1 tp0) was killed by SIGKILL at step" in sentence
    assert not live.orphans()


def test_ctrl_c_finishes_the_step(live: Live) -> None:
    live.until_step(1)
    live.process.send_signal(signal.SIGINT)
    assert live.rest() == 130
    assert live.events[-1]["event"] == "end" and live.events[-1]["exit"] == 130
    assert not live.orphans()


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = [
        "engine",
        "run",
        DEMO,
        *TWO_RANKS,
        "train.steps=3",
        "--json",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    done = run([*torchrun, *arguments])
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "end"]


@pytest.mark.parametrize(
    ("argument", "names"),
    [
        ("grid.tp=3", ["grid.tp = 3", "legal: 1, 2"]),
        ("knobs.micro_batches=7", ["knobs.micro_batches = 7", "legal: 2, 4, 8, 16"]),
        ("data.source=text:/nowhere/*", ["text:/nowhere/*", "names no file"]),
        ("data.source=text:py*.nothing", ["names no file"]),
        ("run.dir=pyproject.toml", ["pyproject.toml", "Not a directory"]),
        ("train.stepz=7", ["train.stepz", "did you mean steps?"]),
        ("--hub=ftp://x", ["ftp://x"]),
        ("--wrong", ["--wrong"]),
    ],
)
def test_refuses_in_one_sentence(argument: str, names: list[str]) -> None:
    refused = run_program(*engine(DEMO, argument), timeout=120)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
    assert all(name in refused.stderr for name in names), refused.stderr
