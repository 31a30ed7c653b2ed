"""Export to TensorBoard and Weights & Biases: each number of the step summaries becomes a curve."""

import os
from collections.abc import Iterator
from pathlib import Path

from agents.protocol import Hello, Summary
from agents.recording.reader import Recording
from cockpit.export.tables import flat
from cockpit.export.updates import simulated, updates


def curves(recording: Recording) -> Iterator[tuple[Summary, dict[str, float]]]:
    """The summaries in order of arrival, with their numbers by tag: ``train/loss``, ``comm/tp/bytes``; for a simulated
    run ``simulated/train/loss``."""
    mark = "simulated/" if simulated(recording) else ""
    for _, update in updates(recording):
        if isinstance(update, Summary):
            yield (
                update,
                {
                    f"{mark}{_tag(name)}": value
                    for name, value in flat(update).items()
                    if isinstance(value, int | float) and name not in ("step", "time_s")
                },
            )


def _tag(column: str) -> str:
    return column.replace(".", "/") if "." in column else f"train/{column}"


def to_tensorboard(recording: Recording, out: Path) -> int:
    """Write an event file in `out` with TensorBoard's own writer; returns the number of values."""
    from tensorboard.summary import Writer

    writer = Writer(str(out))
    count = 0
    for summary, numbers in curves(recording):
        for tag, value in numbers.items():
            writer.add_scalar(tag, value, summary.step, wall_time=summary.time_s)
            count += 1
    writer.close()
    return count


def to_wandb(recording: Recording, out: Path) -> int:
    """Write an offline run under `out`, for ``wandb sync``; returns the number of steps."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    hello = next((update for _, update in updates(recording) if isinstance(update, Hello)), None)
    run = wandb.init(
        project="cockpit",
        name=hello.run if hello else None,
        dir=str(out),
        mode="offline",
        config=hello.facts if hello else {},
        # Export only the curves of the run, no data of this machine.
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
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    count = 0
    for summary, numbers in curves(recording):
        run.log({"step": summary.step, **numbers})
        count += 1
    run.finish()
    wandb.teardown()  # waits until the W&B process has written everything
    return count
