"""Measures how well previews predict the effect of random knob changes on a live run.

python -m tests.bench preview [--changes=N] [--run=FOLDER] [section.key=value ...]

The benchmark starts layouts/demo.toml with two pipeline ranks, or uses the live run in FOLDER, for example a simulated
one. For each change, the benchmark requests a preview, applies the change and measures the steps after it. If the
measured effect exceeds the noise, the benchmark reports whether the preview predicted its direction (faster or slower).
The benchmark also reports whether each predicted interval contains the measured value. A preview whose interval
contains the current step time predicts no direction; such previews are counted separately. The benchmark also prints
how wide the intervals are, because a wide one contains almost any value.
"""

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean, median, stdev

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
    """Yield a client of the run given by `--run`, or of a new run, which is stopped on exit."""
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
    """Wait for the next `SKIPPED + WINDOW` steps with these knob values, and return the times of the last `WINDOW`
    steps in ms."""
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
    """A random legal change: sets a knob to another of its choices, or changes the capacity factor."""
    assert client.state.board is not None
    knobs = [knob for knob in client.state.board.knobs if not knob.action and len(knob.legal.choices) > 1]
    capacity = next((knob for knob in client.state.board.knobs if knob.name == "capacity_factor"), None)
    if capacity and rng.random() < 0.2:
        values = [value for value in (None, 0.5, 1.0, 1.5) if value != capacity.value]
        return {capacity.name: rng.choice(values)}
    knob = rng.choice(knobs)
    return {knob.name: rng.choice([value for value in knob.legal.choices if value != knob.value])}


def noise(times: list[float]) -> float:
    """Relative standard error of the mean of `times`, computed from the means of blocks of five steps, because these
    means are less correlated than the times of single steps."""
    parts = [fmean(times[n : n + 5]) for n in range(0, len(times), 5)]
    return stdev(parts) / len(parts) ** 0.5 / fmean(times)


def main() -> None:
    rng, count = random.Random(SEED), int(option("changes", "40"))
    found = Outcomes()
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
                clear = abs(effect) > 3 * (noise(before) ** 2 + noise(after) ** 2) ** 0.5
                text += found.add(step, step.interval, step.now, effect, fmean(after), clear)
            print(f"{text} · {step.source}", flush=True)
            before = after
        report(client, found)


@dataclass
class Outcomes:
    """Compares previews with measured step times. For the changes whose measured effect exceeds the noise, `right`,
    `wrong` and `undecided` count how often the preview predicts the direction of the effect correctly, wrongly, or not
    at all. For each way in which previews are computed (`Estimate.source`), `held` lists whether each predicted
    interval contains the measured step time, and `widths` lists the width of each interval as a fraction of the step
    time before the change."""

    right: int = 0
    wrong: int = 0
    undecided: int = 0
    held: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    widths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(
        self,
        step: Estimate,
        interval: tuple[float, float],
        now: float,
        effect: float,
        after: float,
        clear: bool,
    ) -> str:
        """Add a preview and the measured result to the counts; returns text that compares the two."""
        low, high = interval
        source = step.source.split(":")[0].split(",")[0]
        self.held[source].append(low <= after <= high)
        self.widths[source].append((high - low) / now)
        inside = "in" if low <= after <= high else "OUT"
        text = f", predicted {low / now - 1:+.1%} .. {high / now - 1:+.1%} {inside}"
        if not clear:
            return text
        if not step.direction:
            self.undecided += 1
            return f"{text}, no direction"
        right = (step.direction > 0) == (effect > 0)
        self.right, self.wrong = self.right + right, self.wrong + (not right)
        return text if right else f"{text}, WRONG SIGN"


def report(client: Client, found: Outcomes) -> None:
    clear = found.right + found.wrong + found.undecided
    print(
        f"{clear} changes of the step time exceed 3 standard errors; direction as predicted: {found.right}, ",
        end="",
    )
    print(f"opposite: {found.wrong}, not predicted: {found.undecided}")
    for source, held in {"all": [*chain(*found.held.values())], **found.held}.items():
        widths = found.widths[source] if source in found.held else [*chain(*found.widths.values())]
        print(
            f"  step time, {source}: {sum(held)} of {len(held)} inside; median width {median(widths or [0]):.1%}"
        )
    checks: dict[str, list[bool]] = defaultdict(list)
    for event in client.state.events:
        for check in checks_of(event):
            checks[check.quantity].append(check.inside)
    for quantity, inside in checks.items():
        print(f"checked by the run itself, {quantity}: {sum(inside)} of {len(inside)} inside")
