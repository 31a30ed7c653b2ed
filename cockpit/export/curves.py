"""Export to TensorBoard and Weights & Biases: each number of the step summaries becomes a curve.

`cockpit.export.mirror`, which sends the metrics of a live run to these and other programs, uses the same writers.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agents.protocol import Hello, Summary
from agents.recording.reader import Recording
from cockpit.export.tables import flat
from cockpit.export.updates import updates

if TYPE_CHECKING:
    from wandb import Run

Point = tuple[Summary, Mapping[str, float]]  # a step, and its numbers by tag


class CurveWriter(Protocol):
    """Writes the metrics of steps in the format of another program, such as TensorBoard."""

    def write(self, points: Iterable[Point]) -> int:
        """Write the metrics of steps in order of arrival, and return the number of values. A step that is not after the
        last one begins another attempt: the run has resumed from a checkpoint, and the new values count."""

    def close(self) -> None:
        """Write buffered values."""


def numbers(summary: Summary, simulated: bool) -> dict[str, float]:
    """The numbers of a summary by tag, such as ``train/loss`` and ``comm/tp/bytes``, or ``simulated/train/loss`` for a
    simulated run. Missing values are left out."""
    mark = "simulated/" if simulated else ""
    return {
        f"{mark}{_tag(name)}": value
        for name, value in flat(summary).items()
        if isinstance(value, int | float) and name not in ("step", "time_s")
    }


def _tag(column: str) -> str:
    return column.replace(".", "/") if "." in column else f"train/{column}"


def curves(recording: Recording, hello: Hello | None) -> Iterator[Point]:
    """Yields each step summary of a recording and the numbers in this summary, in order of arrival."""
    for summary in _summaries(recording):
        yield summary, numbers(summary, hello is not None and hello.simulated)


def _summaries(recording: Recording) -> Iterator[Summary]:
    return (update for _, update in updates(recording) if isinstance(update, Summary))


def attempts(points: Iterable[Point], last: int | None) -> Iterator[tuple[bool, list[Point]]]:
    """Splits `points` into attempts, each with increasing steps. `last`: the step written before them. The flag says
    whether the attempt begins at a step that was written before."""
    attempt: list[Point] = []
    again = False
    for point in points:
        step = point[0].step
        if last is not None and step <= last:
            if attempt:
                yield again, attempt
            again, attempt = True, []
        attempt.append(point)
        last = step
    if attempt:
        yield again, attempt


def surviving(recording: Recording, hello: Hello | None) -> Iterator[Point]:
    """As `curves`, but without the steps that a resume from an earlier checkpoint has superseded, so that steps only
    increase. Reads the recording twice, because its numbers may not fit into memory."""
    steps: list[int] = []
    places: list[int] = []
    for place, summary in enumerate(_summaries(recording)):
        while steps and steps[-1] >= summary.step:
            steps.pop()
            places.pop()
        steps.append(summary.step)
        places.append(place)
    kept = iter(places)
    wanted = next(kept, None)
    for place, point in enumerate(curves(recording, hello)):
        if wanted is None:
            return  # a live run has recorded more since
        if place == wanted:
            yield point
            wanted = next(kept, None)


def first_hello(recording: Recording) -> Hello | None:
    """The first `Hello` in a recording, the message with which a rank joins a run. None if no rank has joined."""
    return next((update for _, update in updates(recording) if isinstance(update, Hello)), None)


class TensorBoardWriter:
    """Writes an event file in the folder `out`, with scalars as torch's `SummaryWriter` writes them.

    Each attempt begins with a `SessionLog.START` event, at which TensorBoard drops what it has read of this and later
    steps. It takes the first such event in a folder for the start of the run and drops nothing, so the first attempt
    needs one too.
    """

    def __init__(self, out: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._events, self._summaries = event_pb2, summary_pb2
        self._writer = EventFileWriter(str(out))
        self._last: int | None = None

    def write(self, points: Iterable[Point]) -> int:
        count = 0
        for again, attempt in attempts(points, self._last):
            if again or self._last is None:
                start = self._events.SessionLog(status=self._events.SessionLog.START)
                self._add(attempt[0][0], session_log=start)
            for summary, values in attempt:
                scalars = [
                    self._summaries.Summary.Value(tag=tag, simple_value=value)
                    for tag, value in values.items()
                ]
                self._add(summary, summary=self._summaries.Summary(value=scalars))
                count += len(scalars)
            self._last = attempt[-1][0].step
        self._writer.flush()
        return count

    def _add(self, at: Summary, **what: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=at.time_s, step=at.step, **what))

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writes a W&B run with its files under `out`. If `mode` is None, W&B reads the mode from ``WANDB_MODE``.

    What a W&B run has logged cannot be taken back without a server, so each further attempt is a run of its own, in the
    same group.
    """

    def __init__(self, out: Path, hello: Hello | None, mode: str | None) -> None:
        if mode:
            os.environ["WANDB_MODE"] = mode
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._out, self._hello, self._mode = out, hello, mode
        self._last: int | None = None
        self._run = self._init(None)

    def _init(self, first: int | None) -> "Run":
        """Begin a W&B run; `first`: the step at which it begins, if an earlier run has written that step."""
        hello = self._hello
        name = hello.run if hello else None
        run = self._wandb.init(
            project="cockpit",
            name=f"{name} from step {first}" if name and first is not None else name,
            group=name,
            dir=str(self._out),
            mode=self._mode,  # type: ignore[arg-type]
            config=hello.facts if hello else {},
            # Only the curves of the run, no data of this machine.
            settings=self._wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def write(self, points: Iterable[Point]) -> int:
        count = 0
        for again, attempt in attempts(points, self._last):
            if again:
                self._run.finish()
                self._run = self._init(attempt[0][0].step)
            for summary, values in attempt:
                self._run.log({"step": summary.step, **values})
                count += len(values)
            self._last = attempt[-1][0].step
        return count

    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # waits until the W&B process has written everything


def to_tensorboard(recording: Recording, out: Path) -> int:
    """Write a TensorBoard event file in the folder `out`; returns the number of values."""
    return _write(TensorBoardWriter(out), recording, first_hello(recording))[1]


def to_wandb(recording: Recording, out: Path) -> int:
    """Write an offline run under `out`, for ``wandb sync``; returns the number of steps."""
    hello = first_hello(recording)
    return _write(WandbWriter(out, hello, "offline"), recording, hello)[0]


def _write(writer: CurveWriter, recording: Recording, hello: Hello | None) -> tuple[int, int]:
    """Write a whole recording; returns the number of steps and the number of values."""
    steps = 0

    def counted() -> Iterator[Point]:
        nonlocal steps
        for point in surviving(recording, hello):
            steps += 1
            yield point

    values = writer.write(counted())
    writer.close()
    return steps, values
