"""Compares runs: their layouts, their knob values, other properties that they report (such as the type of device), and
their curves, aligned by step, number of tokens or time.

The state of a run is read at the current end of its recording; it includes the curves of the whole run in bounded
memory (`agents.state.metric_curves`).
"""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from agents.protocol import Value
from agents.recording.detail import curve_between
from agents.recording.format import RecordingError
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from agents.rundir.bounded_read import read_ordinary
from agents.rundir.hub_file import check_readable
from agents.rundir.runs import RECORD_FILE, RunError
from cockpit.data import format
from cockpit.data.curves.job_metrics import CURVE_METRICS, CurveMetric
from cockpit.data.curves.segments import Reading, reading, segments
from cockpit.data.curves.view import extent
from cockpit.data.sources.connection import CockpitError
from cockpit.data.store import Store

LAYOUT_FILE: Final = "layout.toml"
LAYOUT_BYTES: Final = 1 << 20
TIMES: Final = 4096  # maximum number of points of a run's clock

CLOCK: Final = "SELECT step, time_s FROM feed WHERE step IS NOT NULL AND id % ? = 0 ORDER BY id"
ROWS: Final = "SELECT COUNT(*) FROM feed"


class By(Enum):
    """The quantity by which compared runs are aligned in a chart; the value is the word that the screen shows."""

    STEP = "step"
    TOKENS = "tokens"
    TIME = "time"


@dataclass(frozen=True)
class Progress:
    """Converts the steps of a run to numbers of tokens or elapsed time, and back. `tokens`: tokens per step; None if
    unknown. `steps` and `seconds`: when each step ended, in ascending order; second 0 is the end of the first known
    step."""

    tokens: int | None = None
    steps: Sequence[int] = ()
    seconds: Sequence[float] = ()

    def x(self, by: By, step: float) -> float | None:
        """The position of a step on the x axis; None if it is unknown."""
        if by is By.STEP:
            return step
        if by is By.TOKENS:
            return None if self.tokens is None else (step + 1) * self.tokens
        return _between(self.steps, self.seconds, step)

    def step(self, by: By, x: float) -> int | None:
        """The step at a position on the x axis, rounded; None if it is unknown."""
        if by is By.STEP:
            return round(x)
        if by is By.TOKENS:
            return None if not self.tokens else round(x / self.tokens) - 1
        found = _between(self.seconds, self.steps, x)
        return None if found is None else round(found)


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float | None:
    """The linearly interpolated y value at `x`; None if `x` is outside `xs`."""
    if not xs or not xs[0] <= x <= xs[-1]:
        return None
    place = bisect_left(xs, x)
    if xs[place] == x or place == 0:
        return ys[place]
    share = (x - xs[place - 1]) / (xs[place] - xs[place - 1])
    return ys[place - 1] + share * (ys[place] - ys[place - 1])


@dataclass
class RunCurves:
    """One of the compared runs: its curves, its layout, and its elapsed time and number of tokens by step. `layout`:
    the flattened keys of the run's layout file, with the overrides that were given at the start of the run.
    """

    name: str
    store: Store
    folder: Path | None = None
    layout: Mapping[str, str] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    damage: Sequence[str] = ()  # what could not be read, one sentence each
    end: tuple[str, int] = ("", 0)  # epoch and number of the newest update

    @property
    def last(self) -> int | None:
        """The newest step for which the run has values; None if it has none."""
        whole = extent(self.store.state)
        return whole[1] if whole else None

    def reading(self, metric: CurveMetric, step: int) -> Reading | None:
        """The value of a metric at a step or, if the step is kept only in a bucket of several steps, the lowest and the
        highest value in the bucket; in the metric's unit. None if no value is known."""
        found = reading(segments(self.store.state, metric.key, None, self.store.curve_view.detail), step)
        return found and Reading(found.low * metric.factor, found.high * metric.factor, found.width)


# ------------------------------------------------------------------------------------------------------ reading


def load_run_curves(folder: Path) -> RunCurves:
    """Read the curves and the layout of a run from its folder. Raises CockpitError if the run has no readable
    recording.
    """
    try:
        check_readable(folder)
        recording = Recording(folder / RECORD_FILE)
    except (RunError, RecordingError) as error:
        raise CockpitError(str(error)) from None
    try:
        replay = Replay(recording)
        replay.seek(recording.at_end())
        replay.forward(lambda moment: False)
        store = Store(lambda: replay.time_s)
        store.adopt(replay.state)
        found = RunCurves(folder.name, store, folder, read_layout(folder), progress_of(store, recording))
        found.damage = list(recording.damage)
        found.end = replay.epoch, replay.seq
    except RecordingError as error:
        raise CockpitError(str(error)) from None
    finally:
        recording.close()
    if found.last is None:
        raise CockpitError(f"{folder / RECORD_FILE} has no step to compare")
    return found


def own_curves(store: Store, folder: Path | None, name: str) -> RunCurves:
    """The curves of the run in `store`; its layout and elapsed time are read from `folder` if possible."""
    found = RunCurves(name, store, folder, read_layout(folder) if folder else {}, progress_of(store, None))
    if folder:
        try:
            check_readable(folder)
            recording = Recording(folder / RECORD_FILE)
            try:
                found.progress = progress_of(store, recording)
            finally:
                recording.close()
        except (RunError, RecordingError) as error:
            found.damage = [str(error)]
    return found


def progress_of(store: Store, recording: Recording | None) -> Progress:
    """The tokens and the elapsed time of a run; without a recording, times are known only for the newest steps."""
    sizes = [store.number(name) for name in ("global_batch", "seq_len")]
    tokens = sizes[0] * sizes[1] if sizes[0] and sizes[1] else None
    points = [(summary.step, summary.time_s) for summary in store.state.summaries]
    if recording is not None and store.state.curve:
        # One clock for all steps: the hub's, because the clocks of ranks may differ from it.
        every = 1 + recording.rows(tuple[int], ROWS)[0][0] // TIMES
        points = recording.rows(tuple[int, float], CLOCK, every)
    steps: list[int] = []
    times: list[float] = []
    for step, time_s in points:
        while steps and steps[-1] > step:  # the run returned to an earlier step, but its clock did not
            steps.pop()
            times.pop()
        if not steps or (step > steps[-1] and time_s > times[-1]):
            steps.append(step)
            times.append(time_s)
    return Progress(tokens, steps, [time_s - times[0] for time_s in times])


def read_layout(folder: Path) -> dict[str, str]:
    """The flattened keys of a run's layout file with their values; empty if the file is missing or cannot be read."""
    try:
        text = read_ordinary(folder / LAYOUT_FILE, LAYOUT_BYTES).decode()
        return dict(_flat(tomllib.loads(text)))
    except (OSError, ValueError, RecursionError):
        return {}


def _flat(tree: Mapping[str, Any], under: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        key = f"{under}{name}"
        if isinstance(value, dict):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, list):
            yield format.clean(key), format.clean(msgspec.json.encode(value, enc_hook=str).decode())
        else:
            yield (
                format.clean(key),
                format.knob(value if isinstance(value, bool | int | float) else str(value)),
            )


# -------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True)
class Difference:
    """A layout key, knob or other property (fact) that has different values in two runs; `·` stands for a missing
    value."""

    kind: str  # layout, knob or fact
    key: str
    values: tuple[str, str]


_IDENTITY: Final = {"name", "run.name", "folder", "command"}  # these differ in every pair of runs


def differences(one: RunCurves, other: RunCurves) -> list[Difference]:
    """The differences between two runs: first keys of their layouts, then current knob values, then facts that the runs
    report and that are not in their layouts, such as the type of device.
    """
    both = (one, other)
    layouts = [run.layout for run in both]
    leaves = {key.rpartition(".")[2] for layout in layouts for key in layout} if all(layouts) else set()
    knobs = [_knobs(run.store) for run in both]
    facts = [_facts(run.store) for run in both]
    facts = [{key: value for key, value in one.items() if key not in leaves} for one in facts]
    found: list[Difference] = []
    for kind, (first, second) in (("layout", layouts), ("knob", knobs), ("fact", facts)):
        if kind == "layout" and not all(layouts):
            continue  # with the layout of only one run, every key would differ
        for key in dict.fromkeys([*first, *second]):
            values = first.get(key, format.MISSING), second.get(key, format.MISSING)
            if values[0] != values[1] and key not in _IDENTITY:
                found.append(Difference(kind, key, values))
    return found


def _knobs(store: Store) -> dict[str, str]:
    board = store.state.board
    if board is None:
        return {}
    return {format.clean(knob.name): format.knob(knob.value) for knob in board.knobs if not knob.action}


def _facts(store: Store) -> dict[str, str]:
    hello = next(iter(store.state.hellos.values()), None)
    if hello is None:
        return {}
    own: dict[str, Value] = {"ranks": hello.world, "device": hello.device, "simulated": hello.simulated}
    return {format.clean(key): format.knob(value) for key, value in (own | dict(hello.facts)).items()}


# ------------------------------------------------------------------------------------------------------- values


@dataclass(frozen=True)
class Pair:
    """The values of a metric in two runs at one step; None where a run has no value at exactly this step."""

    metric: CurveMetric
    step: int
    values: tuple[float | None, float | None]


def last_common(one: RunCurves, other: RunCurves) -> int | None:
    """The last step that both runs have; None if their steps do not overlap."""
    ends = [run.last for run in (one, other)]
    starts = [whole[0] for run in (one, other) if (whole := extent(run.store.state))]
    if ends[0] is None or ends[1] is None:
        return None
    last = min(ends[0], ends[1])
    return last if last >= max(starts) else None


def common_steps(one: RunCurves, other: RunCurves, most: int = 8) -> list[int]:
    """Some of the steps that both runs have: the multiples of a number such as 10, 20 or 50, then the last common step.
    `most`: maximum number of steps returned."""
    last = last_common(one, other)
    if last is None:
        return []
    first = max(whole[0] for run in (one, other) if (whole := extent(run.store.state)))
    span = last - first
    power = 10 ** max(0, math.floor(math.log10(max(1, span / most))))
    every = next(factor * power for factor in (1, 2, 5, 10, 20) if span / (factor * power) < most - 1)
    return [*range(-(-first // every) * every, last, every), last]


def table(one: RunCurves, other: RunCurves, steps: Sequence[int]) -> list[Pair]:
    """The values of the metrics that both runs have, at each of `steps`. If the state contains a step only as part of a
    bucket of several steps, the step's value is read from the recording."""
    exact = [_exact(run, steps) for run in (one, other)]
    found = []
    for metric in CURVE_METRICS:
        values = [values.get(metric.key, {}) for values in exact]
        if all(values):
            for step in steps:
                pair = values[0].get(step), values[1].get(step)
                found.append(Pair(metric, step, (_scaled(metric, pair[0]), _scaled(metric, pair[1]))))
    return found


def _scaled(metric: CurveMetric, value: float | None) -> float | None:
    return None if value is None else value * metric.factor


def _exact(run: RunCurves, steps: Sequence[int]) -> dict[str, dict[int, float]]:
    """For each metric, the run's values by step, limited to the steps in `steps`."""
    found: dict[str, dict[int, float]] = {}
    state = run.store.state
    wanted = set(steps)
    for metric in CURVE_METRICS:
        found[metric.key] = {step: value for step, value in state.points(metric.key) if step in wanted}
    newest = state.summaries[0].step if state.summaries else math.inf
    old = [step for step in steps if step < newest] if state.curve.width > 1 else []
    if old and run.folder:
        recording = Recording(run.folder / RECORD_FILE)
        try:
            for step in old:
                curve = curve_between(recording, step, step, *run.end)
                for metric in CURVE_METRICS if curve else ():
                    found[metric.key].update(curve.points(metric.key) if curve else ())
        finally:
            recording.close()
    return found
