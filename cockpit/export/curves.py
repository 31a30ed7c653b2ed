"""Export to TensorBoard and Weights & Biases: each number of the step summaries becomes a curve.

`cockpit.export.mirror`, which sends the metrics of a live run to these and other programs, uses the same writers.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from agents.protocol import Hello, Summary
from agents.recording.reader import Recording
from cockpit.export.tables import flat
from cockpit.export.updates import updates

Point = tuple[Summary, Mapping[str, float]]  # a step, and its numbers by tag


class CurveWriter(Protocol):
    """Writes the metrics of steps in the format of another program, such as TensorBoard."""

    def write(self, points: Iterable[Point]) -> int:
        """Write the metrics of steps in order of arrival, and return the number of values. The same step can occur
        again after a resume."""

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
    for _, update in updates(recording):
        if isinstance(update, Summary):
            yield update, numbers(update, hello is not None and hello.simulated)


def first_hello(recording: Recording) -> Hello | None:
    """The first `Hello` in a recording, the message with which a rank joins a run. None if no rank has joined."""
    return next((update for _, update in updates(recording) if isinstance(update, Hello)), None)


class TensorBoardWriter:
    """Writes an event file in the folder `out` with TensorBoard's own writer."""

    def __init__(self, out: Path) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(out))

    def write(self, points: Iterable[Point]) -> int:
        count = 0
        for summary, values in points:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, summary.step, wall_time=summary.time_s)
                count += 1
        self._writer.flush()
        return count

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writes a W&B run with its files under `out`. If `mode` is None, W&B reads the mode from ``WANDB_MODE``."""

    def __init__(self, out: Path, hello: Hello | None, mode: str | None) -> None:
        if mode:
            os.environ["WANDB_MODE"] = mode
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project="cockpit",
            name=hello.run if hello else None,
            dir=str(out),
            mode=mode,  # type: ignore[arg-type]
            config=hello.facts if hello else {},
            # Only the curves of the run, no data of this machine.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        # The step counter of W&B must not decrease, but the step of a resumed run does.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Iterable[Point]) -> int:
        count = 0
        for summary, values in points:
            self._run.log({"step": summary.step, **values})
            count += len(values)
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
        for point in curves(recording, hello):
            steps += 1
            yield point

    values = writer.write(counted())
    writer.close()
    return steps, values
