"""Measures how well previews predict random knob changes on a live run.

python -m tests.bench preview [--changes=N] [--run=FOLDER] [section.key=value ...]

The benchmark starts layouts/demo.toml with two pipeline ranks, or uses the live run in FOLDER, for example a simulated
one. It previews each change, makes it and measures the steps after it. It reports whether the predicted step time
changed in the right direction, if the measured effect exceeds the noise, and whether each predicted interval holds the
measured value.
"""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev

from agents.client import Client
from agents.protocol import Changes, Estimate
from agents.rundir.runs import RunError, resolve
from agents.state.preview_checks import checks_of
from agents.waiting import wait_for_command, wait_for_preview

ROOT = Path(__file__).parents[3]
LAYOUT = ["grid.pp=2", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "train.steps=1000000"]
SKIPPED, WINDOW = 2, 20  # number of skipped steps after a change, and of measured steps after those
PATIENCE_S = 120.0
SEED = 12


def option(name: str, default: str) -> str:
    return next((word.split("=", 1)[1] for word in sys.argv if word.startswith(f"--{name}=")), default)


@contextlib.contextmanager
def live_run() -> Iterator[Client]:
    """A client of the run that `--run` names, or of a new run, which ends with the context."""
    if folder := option("run", ""):
        yield from connected(Path(folder))
        return
    overrides = [word for word in sys.argv[1:] if "=" in word and not word.startswith("--")]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engine", "run", "layouts/demo.toml", *LAYOUT, *overrides]
        run = subprocess.Popen(
            [*command, "--run-dir", f"{folder}/run"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield from connected(Path(folder) / "run")
        finally:
            run.terminate()
            run.wait()


def connected(folder: Path) -> Iterator[Client]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            client = Client(resolve(str(folder), folder.parent).clients)
            break
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
    try:
        yield client
    finally:
        client.close()


def window(client: Client, changes: Changes) -> list[float]:
    """Wait for the next `SKIPPED + WINDOW` steps with these knob values; the times of the last `WINDOW`, in ms."""
    first = client.state.summaries[-1].step if client.state.summaries else -1
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        client.poll(0.2)
        steps = [
            one.step_ms
            for one in client.state.summaries
            if one.step > first and all(one.knobs.get(name) == to for name, to in changes.items())
        ]
        if len(steps) >= SKIPPED + WINDOW:
            return steps[SKIPPED : SKIPPED + WINDOW]
    raise TimeoutError("the run makes no steps")


def random_change(client: Client, rng: random.Random) -> Changes:
    """A random legal change of one knob: another of its choices, or another capacity factor."""
    assert client.state.board is not None
    knobs = [knob for knob in client.state.board.knobs if not knob.action and len(knob.legal.choices) > 1]
    capacity = next((knob for knob in client.state.board.knobs if knob.name == "capacity_factor"), None)
    if capacity and rng.random() < 0.2:
        values = [value for value in (None, 0.5, 1.0, 1.5) if value != capacity.value]
        return {capacity.name: rng.choice(values)}
    knob = rng.choice(knobs)
    return {knob.name: rng.choice([value for value in knob.legal.choices if value != knob.value])}


def noise(times: list[float]) -> float:
    """Relative standard error of the mean, from means of five steps, which are less correlated than single steps."""
    parts = [fmean(times[n : n + 5]) for n in range(0, len(times), 5)]
    return stdev(parts) / len(parts) ** 0.5 / fmean(times)


def main() -> None:
    rng, count = random.Random(SEED), int(option("changes", "40"))
    signs = clear = inside = given = 0
    by_source: dict[str, list[bool]] = defaultdict(list)
    with live_run() as client:
        before = window(client, {})
        for number in range(count):
            change = random_change(client, rng)
            answer = wait_for_preview(client, client.preview(change), 30.0)
            step = next((one for one in answer.estimates if one.quantity == "step_ms"), Estimate("step_ms"))
            if answer.why or wait_for_command(client, client.propose(change), PATIENCE_S).state != "applied":
                print(f"{number + 1:3} {change}: refused {answer.why}", flush=True)
                continue
            after = window(client, change)
            effect = fmean(after) / fmean(before) - 1
            text = f"{number + 1:3} {change}: measured {effect:+.1%}"
            if step.interval and step.now:
                low, high = step.interval
                held, given = low <= fmean(after) <= high, given + 1
                inside += held
                by_source[step.source.split(":")[0].split(",")[0]].append(held)
                text += f", predicted {low / step.now - 1:+.1%} .. {high / step.now - 1:+.1%} {'in' if held else 'OUT'}"
                likely = step.point if step.point is not None else (low + high) / 2
                if abs(effect) > 3 * (noise(before) ** 2 + noise(after) ** 2) ** 0.5:
                    clear += 1
                    right = (likely > step.now) == (effect > 0)
                    signs += right
                    text += "" if right else ", WRONG SIGN"
            print(f"{text} · {step.source}", flush=True)
            before = after
        report(client, signs, clear, inside, given, by_source)


def report(
    client: Client, signs: int, clear: int, inside: int, given: int, by_source: dict[str, list[bool]]
) -> None:
    print(f"sign of the step time right: {signs} of {clear} changes whose effect exceeds 3 standard errors")
    print(f"step time inside its interval: {inside} of {given}")
    for source, held in by_source.items():
        print(f"  {source}: {sum(held)} of {len(held)}")
    checks: dict[str, list[bool]] = defaultdict(list)
    for event in client.state.events:
        for check in checks_of(event):
            checks[check.quantity].append(check.inside)
    for quantity, held in checks.items():
        print(f"checked by the run itself, {quantity}: {sum(held)} of {len(held)} inside")
