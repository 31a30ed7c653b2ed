"""Measures how much `cockpit autopilot` speeds up jobs with bad settings, and compares the result with the best fixed
setting.

    python -m tests.bench autopilot [NAME ...]     names of jobs below; without names, all jobs run

Each job starts with bad settings. In one run, the benchmark measures steps with the bad settings, runs the command
`cockpit autopilot`, and then measures each combination of the values within the bounds as a fixed setting. Combinations
that the run refuses, or that would fill more than 95 % of a device's memory, are left out. Finally the benchmark
alternates between three settings and measures each: the initial one, the one that the autopilot found, and the fastest
fixed one. The cost of the trials is the extra time of all steps that ran with values that the autopilot did not keep.
If an alert stops `cockpit autopilot`, the benchmark starts it again, as an operator who has read the alert would do.

The times of simulated jobs come from the planner that also predicts them, so these jobs test the autopilot's choices
and not the predictions. The other two jobs train for real, so they test both the choices and the predictions.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any

from agents.client import Client
from agents.hub.commands.confidence import Ratio, compared
from agents.protocol import Changes, Estimate, Summary, Value
from agents.waiting import wait_for_command, wait_for_preview
from cockpit.knobs.advice import DOES_NOT_FIT
from cockpit.knobs.autopilot import parse_bounds
from cockpit.knobs.values import value_knobs
from engine.planner.advice import FULL
from tests.bench.planner.preview import PATIENCE_S, ROOT, connected

SKIPPED, SEARCHED = (
    3,
    8,
)  # steps left out after a change, and steps that measure a fixed setting in the search
TURNS, STEPS = 4, 20  # turns of the last comparison, and steps of each setting in a turn
LIMIT_S = 420.0  # maximum time of the command
STARTS = 5  # the command is started again up to this number of times if an alert has stopped it


@dataclass(frozen=True)
class Job:
    """A job with bad settings, which `fault` describes. `start`: the arguments of `engine` that start the job.
    `within`: the knobs that the autopilot may change, with their bounds."""

    fault: str
    start: str
    within: str
    options: str = ""


SIMULATE = "simulate --speed"
JOBS = {
    "gpt3-175b": Job(
        "too few micro-batches, full recompute",
        f"{SIMULATE} 200 layouts/frontier/gpt3-175b.toml grid.dp_replicate=4 train.global_batch=384 "
        "knobs.micro_batches=12",
        "micro_batches=1..96 recompute=none,selective,full",
    ),
    "llama3-405b": Job(
        "too few micro-batches for 16 stages, full recompute",
        f"{SIMULATE} 200 layouts/frontier/llama3-405b.toml grid.dp_shard=8 train.global_batch=128 "
        "knobs.micro_batches=4 knobs.recompute=full",
        "micro_batches=1..16 recompute=none,selective,full schedule=interleaved,interleaved_zb",
    ),
    "mixtral-8x7b": Job(
        "too many micro-batches, ZeRO 3, capacity factor too high",
        f"{SIMULATE} 50 layouts/frontier/mixtral-8x7b.toml train.global_batch=1024 knobs.micro_batches=16 "
        "train.zero=3 knobs.capacity_factor=4",
        "micro_batches=1..16 zero=1,2,3 capacity_factor=1.5,2,4",
        "--allow-loss capacity_factor",
    ),
    "qwen3-235b": Job(
        "too few micro-batches, full recompute",
        f"{SIMULATE} 200 layouts/frontier/qwen3-235b-a22b.toml train.global_batch=512 knobs.micro_batches=8 "
        "knobs.recompute=full",
        "micro_batches=1..32 recompute=none,full schedule=interleaved,interleaved_zb",
    ),
    "qwen3-235b-undecided": Job(
        "the same, with --undecided",
        f"{SIMULATE} 200 layouts/frontier/qwen3-235b-a22b.toml train.global_batch=512 knobs.micro_batches=8 "
        "knobs.recompute=full",
        "micro_batches=1..32 recompute=none,full schedule=interleaved,interleaved_zb",
        "--undecided",
    ),
    "deepseek-v3": Job(
        "nothing is wrong, except perhaps the choice between two good schedules",
        f"{SIMULATE} 200 layouts/frontier/deepseek-v3.toml grid.dp_shard=64 train.global_batch=7680 "
        "schedule.name=zbv",
        "micro_batches=60,120 schedule=zbv,dualpipev",
    ),
    "llama-mini": Job(
        "too many micro-batches, full recompute, ZeRO 3",
        "run layouts/llama-mini.toml grid.tp=1 train.global_batch=16 knobs.micro_batches=8 knobs.recompute=full",
        "micro_batches=1..8 recompute=none,full zero=1,2,3",
    ),
    "deepseek-mini": Job(
        "too many micro-batches, full recompute",
        "run layouts/deepseek-mini.toml grid.dp_shard=1 grid.ep=1 train.global_batch=16 knobs.micro_batches=16 "
        "knobs.recompute=full",
        "micro_batches=2..16 recompute=none,full",
    ),
}


@contextlib.contextmanager
def running(job: Job, folder: Path) -> Iterator[Client]:
    """Start the job and yield a client of its run; stop the job on exit."""
    command = [
        sys.executable,
        "-m",
        "engine",
        *job.start.split(),
        "train.steps=1000000",
        "--run-dir",
        str(folder),
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, **quiet)  # type: ignore[call-overload]
    try:
        yield from connected(folder)
    finally:
        process.terminate()
        process.wait()


@dataclass
class Watcher:
    """Follows a run through `client`, and reads the summary of each step once."""

    client: Client
    last: int = -1
    steps: list[Summary] = field(default_factory=list)

    def poll(self) -> list[Summary]:
        """The steps that arrived since the last call."""
        self.client.poll(0.1)
        new = [one for one in self.client.state.summaries if one.step > self.last]
        self.last = new[-1].step if new else self.last
        return new

    def window(self, values: Changes, count: int) -> list[float]:
        """Step times in ms of `count` steps with these knob values, not counting the first `SKIPPED` steps."""
        times: list[float] = []
        self.poll()
        until = time.monotonic() + PATIENCE_S
        while len(times) < SKIPPED + count:
            if time.monotonic() > until:
                raise TimeoutError("the run makes no steps")
            times += [one.step_ms for one in self.poll() if _holds(one, values)]
        return times[SKIPPED : SKIPPED + count]

    def values(self, names: Sequence[str]) -> Changes:
        return {knob.name: knob.value for knob in value_knobs(self.client.state.board) if knob.name in names}

    def fits(self, values: Changes) -> bool:
        """Whether `values` are legal and need so little memory that the hub raises no alert."""
        answer = wait_for_preview(self.client, self.client.preview(values), PATIENCE_S)
        peak = next((one for one in answer.estimates if one.quantity == "peak_bytes"), Estimate("peak_bytes"))
        totals = [
            one.device_memory_total for one in self.client.state.vitals.values() if one.device_memory_total
        ]
        full = totals and peak.after and peak.after > FULL * min(totals)
        return not (answer.why or full or DOES_NOT_FIT in peak.source)

    def use(self, values: Changes) -> None:
        """Set the knobs to `values`, and wait until the change is applied."""
        changes = {name: to for name, to in values.items() if self.values([name])[name] != to}
        if changes:
            command = wait_for_command(self.client, self.client.propose(changes), PATIENCE_S)
            assert command.state == "applied", command.why


def _holds(step: Summary, values: Changes) -> bool:
    return all(step.knobs.get(name) == to for name, to in values.items())


@dataclass(frozen=True)
class Flight:
    """What the autopilot did: the lines of its output, and the steps that the run completed while the autopilot ran."""

    lines: list[dict[str, Any]]
    steps: list[Summary]
    names: Sequence[str]

    @property
    def trials(self) -> int:
        return sum(line["event"] == "outcome" for line in self.lines)

    @property
    def kept(self) -> int:
        return sum(int(str(line["kept"])) for line in self.lines if line["event"] == "stop")

    @property
    def starts(self) -> int:
        return sum(line["event"] == "stop" for line in self.lines)

    def cost_ms(self) -> float:
        """Time lost, in ms, to knob values that were later reverted: the extra time of the steps with these values,
        relative to the mean step time before the change."""
        parts = [
            (key, [one.step_ms for one in steps])
            for key, steps in groupby(self.steps, key=lambda one: self._key(one))
        ]
        return sum(
            max(0.0, sum(tried) - len(tried) * fmean(before))
            for (was, before), (_, tried), (then, _) in zip(parts, parts[1:], parts[2:], strict=False)
            if was == then
        )

    def _key(self, step: Summary) -> str:
        return json.dumps([step.knobs.get(name) for name in self.names])


def fly(job: Job, folder: Path, watcher: Watcher, names: Sequence[str]) -> Flight:
    """Run the command `cockpit autopilot` until it stops; start it again if an alert has stopped it."""
    lines: list[dict[str, Any]] = []
    steps: list[Summary] = []
    for _ in range(STARTS):
        more, during = fly_once(job, folder, watcher)
        lines, steps = lines + more, steps + during
        if "an alert was raised" not in more[-1]["text"]:
            break
    return Flight(lines, steps, names)


def fly_once(job: Job, folder: Path, watcher: Watcher) -> tuple[list[dict[str, Any]], list[Summary]]:
    """Run the command once. Returns the lines of its output, and the steps that the run completed during the
    command."""
    command = [
        sys.executable,
        "-m",
        "cockpit",
        "autopilot",
        "--run",
        str(folder),
        "--json",
        *job.options.split(),
    ]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([*command, "--within", *job.within.split()], cwd=ROOT, stdout=out)
        watcher.poll()
        steps, until = list[Summary](), time.monotonic() + LIMIT_S
        while process.poll() is None:
            steps += watcher.poll()
            if time.monotonic() > until:
                process.terminate()
        out.seek(0)
        lines = [json.loads(line) for line in out]
    assert lines, f"the command ended with exit status {process.returncode}"
    return lines, steps


def within(job: Job, watcher: Watcher) -> dict[str, list[Value]]:
    """For each knob with bounds: the currently legal values within the bounds."""
    bounds = parse_bounds(job.within.split())
    knobs = value_knobs(watcher.client.state.board)
    return {knob.name: bounds.legal(knob) for knob in knobs if knob.name in bounds.names}


def search(watcher: Watcher, legal: Mapping[str, Sequence[Value]]) -> tuple[Changes, int]:
    """Measure every legal combination of the values within the bounds; returns the fastest one, and the number of
    measured combinations."""
    found: list[tuple[float, Changes]] = []
    for values in product(*legal.values()):
        setting = dict(zip(legal, values, strict=True))
        if watcher.fits(setting):
            watcher.use(setting)
            found.append((fmean(watcher.window(setting, SEARCHED)), setting))
    return min(found, key=lambda one: one[0])[1], len(found)


def in_turns(watcher: Watcher, settings: Sequence[Changes]) -> list[list[float]]:
    """Measure the step times of each setting `TURNS` times, alternating between the settings."""
    times: list[list[float]] = [[] for _ in settings]
    for _ in range(TURNS):
        for mine, setting in zip(times, settings, strict=True):
            watcher.use(setting)
            mine += watcher.window(setting, STEPS)
    return times


def measure(name: str, job: Job, say: Callable[[str], None]) -> None:
    names = sorted(parse_bounds(job.within.split()).names)
    with tempfile.TemporaryDirectory() as parent, running(job, folder := Path(parent) / "run") as client:
        watcher = Watcher(client)
        while not client.state.summaries or not client.state.board:
            watcher.poll()
        bad, legal = watcher.values(names), within(job, watcher)
        before = watcher.window(bad, STEPS)
        say(f"{name}: {job.fault}; {text(bad)}: {fmean(before):,.0f} ms a step")
        flight = fly(job, folder, watcher, names)
        for line in flight.lines:
            say(f"    {line['text']}")
        result = watcher.values(names)
        best, count = search(watcher, legal)
        start, mine, fixed = in_turns(watcher, [bad, result, best])
        lost = sum(one.step_ms for one in flight.steps) - len(flight.steps) * fmean(before)
        say(
            f"  step time over that of the start: autopilot {shown(compared(start, mine))} with {text(result)}; "
            f"best of {count} fixed settings {shown(compared(start, fixed))} with {text(best)}"
        )
        say(
            f"  starts {flight.starts}, trials {flight.trials}, kept {flight.kept}, cost of the trials "
            f"{flight.cost_ms() / 1e3:,.1f} s, with {fmean(before) / 1e3:,.2f} s a step"
        )
        say(f"  the {len(flight.steps)} steps of the flight took {lost / 1e3:+,.1f} s over untouched steps")


def text(values: Changes) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def shown(ratio: Ratio | None) -> str:
    return f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})" if ratio else "not comparable"


def main() -> None:
    for name in [word for word in sys.argv[1:] if word in JOBS] or JOBS:
        measure(name, JOBS[name], lambda line: print(line, flush=True))
