"""Saving and resuming: with another layout, after kills, after knob changes, and with the command `engine run`."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from engine.checkpoint.manifest import PARTIAL
from engine.checkpoint.reading import complete_checkpoints
from tests.ranks.checkpoint.resume import (
    DATA_RESUMED,
    MTP,
    OWN_MODEL,
    RESUMED,
    SWITCHED_AT,
    SWITCHES,
    TIES,
    tensors_in,
)
from tests.ranks.driver import eventually
from tests.ranks.launch.test_run import DEMO, engine
from tests.ranks.launch.test_run import run as run_command
from tests.ranks.parity.comparison import FP64_TOLERANCE
from tests.ranks.program import Program, run

RESUME = ["-W", "ignore", "-m", "tests.ranks.checkpoint.resume"]
SMALLER = ["grid.pp=1", "grid.dp_shard=1", "grid.tp=2", "grid.ep=2", "model.layers=2", "train.global_batch=8"]
SMALLER += ["knobs.micro_batches=2", "checkpoint.every=2", "--json", "--hub", "none"]

Driven = Callable[[str], Path]


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Driven:
    """A function that runs a scenario of `tests.ranks.checkpoint.resume` and returns its folder."""

    def drive(scenario: str) -> Path:
        folder = tmp_path_factory.mktemp(scenario)
        done = run(*RESUME, str(folder), scenario, timeout=280)
        assert done.returncode == 0, done.stderr[-4000:]
        return folder

    return drive


def result(folder: Path, name: str) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return outcome


def assert_same(a: list[float], b: list[float]) -> None:
    assert len(a) == len(b)
    assert max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)) < FP64_TOLERANCE, (a, b)


def assert_same_tensors(a: Path, b: Path) -> None:
    ours, theirs = tensors_in(a), tensors_in(b)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=FP64_TOLERANCE, atol=FP64_TOLERANCE, msg=name)


def test_resumes_in_any_other_layout(driven: Driven) -> None:
    folder = driven("resumed")
    begun = result(folder, "begun")
    assert begun["steps"] == list(range(10))
    names = tensors_in(folder / "begun/checkpoints/step-5")
    assert "model.layers.3.mlp.experts.gate.5" in names and "optimizer.exp_avg.layers.0.attention.q" in names
    for name in RESUMED:
        resumed = result(folder, name)
        assert resumed["steps"] == list(range(5, 10))
        assert_same(resumed["losses"], begun["losses"][5:])
        assert_same(resumed["norms"], begun["norms"][5:])
        assert_same_tensors(folder / name / "checkpoints/step-10", folder / "begun/checkpoints/step-10")


@pytest.mark.exhaustive
def test_token_shards_resume_and_validate_in_any_other_layout(driven: Driven) -> None:
    folder = driven("shards")
    begun = result(folder, "begun")
    assert begun["steps"] == list(range(8)) and list(begun["validation"]) == ["1", "3", "5", "7"]
    assert begun["rates"][2] > begun["rates"][5] > begun["rates"][7] > 0
    names = tensors_in(folder / "begun/checkpoints/step-4")
    assert "optimizer.average.layers.3.attention.q" in names
    for name in DATA_RESUMED:
        resumed = result(folder, name)
        assert resumed["steps"] == list(range(4, 8)) and list(resumed["validation"]) == ["5", "7"]
        assert_same(resumed["losses"], begun["losses"][4:])
        assert_same(resumed["norms"], begun["norms"][4:])
        assert_same([*resumed["validation"].values()], [*begun["validation"].values()][2:])
        assert_same_tensors(folder / name / "checkpoints/step-8", folder / "begun/checkpoints/step-8")
    unvalidated = result(folder, "unvalidated")
    assert unvalidated["losses"] == begun["losses"] and unvalidated["norms"] == begun["norms"], (
        "validation and averages must not change the losses"
    )
    assert not unvalidated["validation"]
    still = result(folder, "still")
    assert_same([*still["validation"].values()], still["losses"])


def assert_resumed_one_after_the_other(folder: Path, layouts: dict[str, list[str]]) -> Path:
    first, *_ = layouts
    begun = result(folder, first)
    for n, name in enumerate(layouts):
        run = result(folder, name)
        assert run["steps"] == list(range(2 * n, 6))
        assert_same(run["losses"], begun["losses"][2 * n :])
        assert_same(run["norms"], begun["norms"][2 * n :])
        assert_same_tensors(folder / name / "checkpoints/step-6", folder / first / "checkpoints/step-6")
    return folder / first / "checkpoints/step-6"


def test_a_tied_weight_is_saved_once_and_resumes_in_any_layout(driven: Driven) -> None:
    names = tensors_in(assert_resumed_one_after_the_other(driven("tied"), TIES))
    assert "model.embedding.weight" in names and not any("head" in name for name in names)


def test_further_predictions_resume_in_any_layout_and_with_validation(driven: Driven) -> None:
    names = tensors_in(assert_resumed_one_after_the_other(driven("mtp"), MTP))
    assert {"model.mtp.4.joint", "optimizer.exp_avg.mtp.5.block.mlp.experts.up.5"} <= names.keys()
    assert not any("embedding_copy" in name for name in names)


@pytest.mark.exhaustive
def test_another_model_resumes_in_any_layout(driven: Driven) -> None:
    names = tensors_in(assert_resumed_one_after_the_other(driven("own_model"), OWN_MODEL))
    assert "model.embedding.positions.weight" in names and "optimizer.exp_avg.layers.3.qkv.bias" in names


def assert_switched_equals_launched(folder: Path, knobs: list[str]) -> None:
    for knob in knobs:
        switched, launched = result(folder, f"switched-{knob}"), result(folder, f"launched-{knob}")
        assert switched["history"][-1] == [SWITCHED_AT - 1, SWITCHED_AT], knob
        assert launched["steps"] == switched["steps"][1:]
        assert_same(switched["losses"][1:], launched["losses"])
        assert_same(switched["norms"][1:], launched["norms"])
        last = f"checkpoints/step-{launched['steps'][-1] + 1}"
        assert_same_tensors(folder / f"switched-{knob}" / last, folder / f"launched-{knob}" / last)
    dropping = result(folder, "switched-capacity_factor")
    assert dropping["dropped"][0] == 0 < min(dropping["dropped"][1:])


def test_a_switch_equals_a_launch_with_the_new_value(driven: Driven) -> None:
    assert_switched_equals_launched(driven("one_knob"), ["capacity_factor"])


@pytest.mark.exhaustive
def test_a_switch_of_each_knob_equals_a_launch_with_the_new_value(driven: Driven) -> None:
    folder = driven("each_knob")
    untouched = result(folder, "knobs")
    knobs = [path.stem.removeprefix("switched-") for path in folder.glob("switched-*.json")]
    assert {"micro_batches", "recompute", "capacity_factor", "lr_scale", "grad_clip"} <= set(knobs)
    assert_switched_equals_launched(folder, knobs)
    for knob in ("lr_scale", "grad_clip"):
        outcome = result(folder, f"switched-{knob}")
        assert abs(outcome["losses"][-1] - untouched["losses"][-1]) > 1e-3, f"{knob} had no effect"


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_hundred_random_switches_change_nothing(driven: Driven) -> None:
    folder = driven("random_switches")
    untouched, fickle = result(folder, "untouched"), result(folder, "fickle")
    assert (untouched["switches"], fickle["switches"], len(fickle["history"])) == (0, SWITCHES, SWITCHES)
    assert_same(fickle["losses"], untouched["losses"])
    assert_same(fickle["norms"], untouched["norms"])


def test_killed_during_a_save(tmp_path: Path) -> None:
    """If a save never finishes, training continues until the next save is due. Older checkpoints are not lost."""
    process = Program(*RESUME, str(tmp_path), "cut_short")
    try:
        eventually(lambda: len(list(tmp_path.glob("writing.*"))) == 2, 60)
        eventually(lambda: (tmp_path / "step-8").exists(), 60)
        time.sleep(0.5)
        assert not (tmp_path / "step-9").exists(), "the next save waits for the previous one"
        family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    psutil.wait_procs(family, timeout=10)
    checkpoints_dir = tmp_path / "run/checkpoints"
    assert (checkpoints_dir / f"step-6{PARTIAL}").is_dir()
    assert [checkpoint.manifest.step for checkpoint in complete_checkpoints(checkpoints_dir)] == [3]
    layout = ["grid.tp=1", "model.seq_len=32", "model.d_model=32", "model.moe.d_expert=48", "train.warmup=4"]
    layout += ["train.optimizer=sgd", "train.lr=0.1", "train.steps=7", "checkpoint.every=3"]
    words = engine(DEMO, *SMALLER, *layout, "grid.ep=1", "--run-dir", str(tmp_path / "run"), "--resume")
    resumed = run(*words, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    start, *events = map(json.loads, resumed.stdout.splitlines())
    assert start["resumed"] == 3
    assert [event["step"] for event in events if event["event"] == "step"] == [3, 4, 5, 6]
    assert sorted(path.name for path in checkpoints_dir.glob("step-*")) == ["step-3", "step-6", "step-7"]


def until(process: Program, step: int) -> list[dict[str, Any]]:
    """Read the events of a run up to step `step`."""
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "step" and events[-1]["step"] >= step:
            return events
    raise AssertionError("the run ended")


def steps_of(events: list[dict[str, Any]]) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in events if event["event"] == "step"}


@pytest.fixture
def killed_after() -> Iterator[list[psutil.Process]]:
    """Processes in this list are killed after the test, even if the test fails."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_killed_rank_and_resume_on_the_command_line(
    tmp_path: Path, killed_after: list[psutil.Process]
) -> None:
    words = engine(DEMO, *SMALLER, "train.steps=100000", f"run.dir={tmp_path}", "run.name=mine")
    process = Program(*words, errors=tmp_path / "errors")
    events = until(process, 5)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    killed_after.extend(family)
    for member in family:  # while the run is suspended, the next two commands can use all cores
        member.suspend()
    second = run(*engine(DEMO, *SMALLER, f"run.dir={tmp_path}", "run.name=mine", "--resume"), timeout=120)
    assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
    assert f"is in use by process {process.pid} on " in second.stderr, "it is alive"
    here = [f"checkpoint.dir={tmp_path}/elsewhere", "--run-dir", str(tmp_path / events[0]["run"])]
    third = run(*engine(DEMO, *SMALLER, *here), timeout=120)
    assert third.returncode == 2 and len(third.stderr.splitlines()) == 1
    assert f"{events[0]['run']} is in use by process {process.pid} on " in third.stderr, (
        "the checkpoints folder is locked too"
    )
    for member in reversed(family):
        member.resume()
    events += until(process, 8)
    family[2].kill()
    events += [json.loads(line) for line in process.stdout]
    assert process.wait(60) == 1
    # A step is printed one step late, so the checkpoint may contain one more step.
    killed_at = max(steps_of(events))
    other = ["grid.tp=1", "grid.pp=2", "grid.ep=1", "schedule.name=gpipe", f"train.steps={killed_at + 3}"]
    words = engine(DEMO, *SMALLER, *other, f"run.dir={tmp_path}", "run.name=mine", "--resume")
    resumed = run(*words, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    again = [json.loads(line) for line in resumed.stdout.splitlines()]
    start = again[0]
    assert start["run"] == events[0]["run"], "the same run continues"
    assert killed_at - 4 <= start["resumed"] <= killed_at + 2 and start["resumed"] % 2 == 0
    losses = steps_of(again)
    assert list(losses) == list(range(start["resumed"], killed_at + 3))
    for step in losses.keys() & steps_of(events).keys():
        assert abs(losses[step] - steps_of(events)[step]) < 1e-4
    saved = [event for event in again if event["event"] == "checkpoint"]
    assert saved[-1]["step"] == killed_at + 3 and Path(saved[-1]["folder"]).is_dir()


@pytest.mark.exhaustive
def test_torchrun_restarts_and_the_run_continues(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    torchrun += ["--max-restarts", "1", "-m", "engine", "run", DEMO, *SMALLER]
    process = Program(*torchrun, "train.steps=16", f"run.dir={tmp_path}", errors=tmp_path / "errors")
    events = until(process, 4)
    victim = next(p for p in psutil.Process(process.pid).children() if p.environ().get("RANK") == "1")
    victim.send_signal(signal.SIGKILL)
    events += [json.loads(line) for line in process.stdout]
    assert process.wait(60) == 0
    begun, again = (event for event in events if event["event"] == "start")
    assert begun["resumed"] is None and begun["run"] == again["run"]
    assert again["resumed"] >= 2 and again["resumed"] % 2 == 0
    assert events[-1] == events[-1] | {"event": "end", "steps": 16, "exit": 0}
    first, second = events[: events.index(again)], events[events.index(again) :]
    assert list(steps_of(second)) == list(range(again["resumed"], 16))
    for step in steps_of(first).keys() & steps_of(second).keys():
        assert steps_of(first)[step] == steps_of(second)[step]


@pytest.mark.exhaustive
def test_the_checkpoints_knobs_take_precedence(tmp_path: Path) -> None:
    """A knob changed before the checkpoint keeps its value; a change after the checkpoint is rolled back and not
    applied again."""
    run_dir = tmp_path / "run"
    layout = [*SMALLER, "train.steps=1000", "checkpoint.every=0", "--hub", "auto", "--run-dir", str(run_dir)]
    words = engine(DEMO, *layout)

    def cockpit(*words: str) -> dict[str, Any]:
        outcome = run_command(
            [sys.executable, "-m", "cockpit", words[0], "--run", str(run_dir), *words[1:], "--json"]
        )
        answer: dict[str, Any] = json.loads(outcome.stdout)
        return answer

    process = Program(*words, errors=tmp_path / "errors")
    try:
        until(process, 1)
        for changes in (["micro_batches=4"], ["save"], ["micro_batches=8", "lr_scale=0.5"]):
            answer = cockpit("set", *changes, "--wait")
            assert answer["state"] == "applied", answer
            assert ("save" in changes) <= bool(complete_checkpoints(run_dir / "checkpoints")), (
                "applied means saved"
            )
    finally:
        process.kill()
        process.communicate()
    saved_at = complete_checkpoints(run_dir / "checkpoints")[0].manifest
    assert (saved_at.revision, [applied.revision for applied in saved_at.history]) == (2, [1, 2])

    process = Program(*words, "--resume", errors=tmp_path / "errors")
    try:
        first = until(process, saved_at.step)[-1]
        assert first["knobs"]["micro_batches"] == 4 and first["knobs"]["lr_scale"] == 1.0
        assert (first["step"], first["revision"]) == (saved_at.step, 2)
        after = cockpit("set", "recompute=full", "--wait")
        assert (after["state"], after["revision"]) == ("applied", 4)
        log = run_command([sys.executable, "-m", "cockpit", "log", "--run", str(run_dir)]).stdout
        rolled_back = [line for line in log.splitlines() if "rolled_back" in line]
        assert len(rolled_back) == 1 and "micro_batches 4→8" in rolled_back[0]
        assert f"the run resumed from step {saved_at.step}, at revision 2" in rolled_back[0]
        until(process, after["applied_step"])
        process.send_signal(signal.SIGTERM)
        events = [json.loads(line) for line in process.stdout]
        steps = [event for event in events if event["event"] == "step"]
        assert process.wait(60) == 0 and steps[-1]["knobs"]["micro_batches"] == 4
    finally:
        process.kill()
        process.communicate()


@pytest.mark.exhaustive
@pytest.mark.parametrize("slow_rank", ["0", "1"])
def test_a_rank_that_reads_slowly_does_not_end_the_start(tmp_path: Path, slow_rank: str) -> None:
    """Under torchrun, the ranks wait for a rank that reads its data and its share of the checkpoint for longer than
    the time-out of the store. The newest checkpoint is damaged in the share of rank 1."""
    layout = [*SMALLER, "--run-dir", str(tmp_path / "run")]
    begun = run(*engine(DEMO, *layout, "train.steps=4"), timeout=120)
    assert begun.returncode == 0, begun.stderr
    newest = tmp_path / "run/checkpoints/step-4/rank-1.bin"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\0")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*torchrun, "-m", "tests.ranks.launch.delayed", "run", DEMO, *layout, "--resume"]
    done = run(*words, "train.steps=6", environ=os.environ | {"SLOW_RANK": slow_rank}, timeout=240)
    assert done.returncode == 0, done.stderr
    assert f"skipped a checkpoint: {newest.parent} is damaged: rank-1.bin has changed" in done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [event["step"] for event in events if event["event"] == "step"] == [2, 3, 4, 5]


def test_the_step_before_a_checkpoint_is_not_lost(tmp_path: Path) -> None:
    """A rank is killed in the step after a checkpoint. The step before it, which is not trained again, has its line
    and its validation loss."""
    folder = tmp_path / "run"
    module = ["-m", "tests.ranks.checkpoint.killed_after_save", str(folder / "checkpoints")]
    words = [*module, "run", DEMO, *SMALLER, "checkpoint.every=3", "train.steps=5", "elastic.restarts=1"]
    words += ["validation.every=3", "validation.source=stdlib", "validation.sequences=8", "model.layers=1"]
    done = run(*words, "--run-dir", str(folder), timeout=120)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["lost_steps"] for event in events if event["event"] == "restart"] == [0]
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == [0, 1, 2, 3, 4]
    assert [step["step"] for step in steps if step["validation_loss"] is not None] == [2, 4]
