"""TensorBoard and Weights & Biases: the curves of a run, every number that a step's summary has."""

import os
from collections.abc import Iterator
from pathlib import Path

from agents.protocol import Hello, Summary
from agents.recording.reader import Recording
from cockpit.export.tables import flat
from cockpit.export.updates import told


def curves(recording: Recording) -> Iterator[tuple[Summary, dict[str, float]]]:
    """The summaries in the order they were told, with their numbers by tag: ``train/loss``, ``comm/tp/bytes``."""
    for _, update in told(recording):
        if isinstance(update, Summary):
            yield (
                update,
                {
                    _tag(name): value
                    for name, value in flat(update).items()
                    if isinstance(value, int | float) and name not in ("step", "time_s")
                },
            )


def _tag(column: str) -> str:
    return column.replace(".", "/") if "." in column else f"train/{column}"


def to_tensorboard(recording: Recording, out: Path) -> int:
    """An event file in `out`, by TensorBoard's own writer."""
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
    """An offline run under `out`, which ``wandb sync`` uploads."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    hello = next((update for _, update in told(recording) if isinstance(update, Hello)), None)
    run = wandb.init(
        project="cockpit",
        name=hello.run if hello else None,
        dir=str(out),
        mode="offline",
        config=hello.facts if hello else {},
        # The curves of the run, and nothing of the machine that exports them.
        settings=wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
        ),
    )
    # Its own counter may never go back, and a run that was resumed does.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    count = 0
    for summary, numbers in curves(recording):
        run.log({"step": summary.step, **numbers})
        count += 1
    run.finish()
    wandb.teardown()  # its own process has written all of it when it is gone
    return count
