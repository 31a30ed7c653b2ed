"""Compares loss and bytes sent for each gradient compression method, with one demo run of two replicas per method.

    python -m tests.bench.compression FOLDER [STEPS]

Writes the losses of all runs to FOLDER/compression.json, prints the table of docs/train/compression.md, and draws
FOLDER/compression.svg: the loss and the bytes of each method.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from agents.protocol import Summary
from agents.rank.agent import Agent
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.rendezvous import RankContext
from engine.train.trainer import Trainer

LAYOUT = Path(__file__).parents[2] / "layouts" / "demo.toml"
TWO_REPLICAS = ["grid.pp=1", "grid.dp_replicate=2", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1"]
SMALL_BATCH = ["train.global_batch=4", "knobs.micro_batches=1", "model.layers=2", "model.moe.experts=4"]
RUNS = {
    "none": [],
    # the same function, other rounding: the noise of the losses
    "none, 2 micro-batches": ["knobs.micro_batches=2"],
    "int8": ["compression.method=int8"],
    "top_k 10 %": ["compression.method=top_k", "compression.ratio=0.1"],
    "top_k 1 %": ["compression.method=top_k", "compression.ratio=0.01"],
    "power_sgd 4": ["compression.method=power_sgd", "compression.rank=4"],
    "bf16": ["compression.method=bf16"],
    "random_k 10 %": ["compression.method=random_k", "compression.ratio=0.1"],
    "threshold 3": ["compression.method=threshold", "compression.threshold=3.0"],
    "fp16": ["compression.method=fp16"],
}


Run = dict[str, list[float]]
"""The values of each step: `loss` and `bytes`."""

WIDTH, TOP, ROW, LEFT, RIGHT = 800, 52, 26, 260, 70  # of the picture, in pixels


def measure(context: RankContext, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    found: dict[str, Run] = {}
    for name, settings in RUNS.items():
        layout = load(
            LAYOUT,
            [
                *TWO_REPLICAS,
                *SMALL_BATCH,
                f"train.steps={steps}",
                *settings,
            ],
        )
        meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
        agent = Agent(None, lambda meter=meter: meter.operation)
        losses: list[float] = []
        sent: list[float] = []

        def note(summary: Summary, losses: list[float] = losses) -> None:
            losses.append(summary.loss or 0.0)

        with Trainer(layout, meter, agent, on_summary=note) as trainer:
            for step in range(steps):
                trainer.train_step(step)
                sent.append(meter.readings.replica_bytes)
        found[name] = {"loss": losses, "bytes": sent}
        if context.rank == 0:
            print(row(name, found[name], found["none"]), flush=True)
            (folder / "compression.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def loss_and_bytes(run: Run) -> tuple[float, float]:
    """The mean loss of the last 20 steps, and the mean bytes per step that a rank sends for the replica reduction."""
    return fmean(run["loss"][-20:]), fmean(run["bytes"])


def row(name: str, run: Run, plain: Run) -> str:
    """One row of the Markdown table."""
    (loss, sent), (base, full) = loss_and_bytes(run), loss_and_bytes(plain)
    return f"| `{name}` | {sent / 1e6:.3f} | {full / sent:.1f} | {loss:.4f} | {loss - base:+.4f} |"


def picture(runs: dict[str, Run]) -> str:
    """An SVG with one row per method, the method with the fewest bytes last: a dot at the method's loss, and the factor
    by which the method sends fewer bytes than `none`. A vertical band marks the range of losses of the runs without
    compression."""
    found = sorted(((name, *loss_and_bytes(run)) for name, run in runs.items()), key=lambda of: -of[2])
    full = found[0][2]
    low, high = min(loss for _, loss, _ in found), max(loss for _, loss, _ in found)
    plain = [loss for name, loss, _ in found if name.startswith("none")]

    def x(loss: float) -> float:
        return LEFT + (loss - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    height = TOP + ROW * len(found) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<rect x="{x(min(plain)):.1f}" y="{TOP - 12}" width="{x(max(plain)) - x(min(plain)):.1f}" '
        f'height="{ROW * len(found)}" fill="#cfe3f3"/>',
        '<text x="16" y="24">method</text><text x="180" y="24">bytes</text>',
        f'<text x="{LEFT}" y="24">loss, mean of the last 20 steps</text>',
    ]
    for n, (name, loss, sent) in enumerate(found):
        y = TOP + ROW * n
        parts += [
            f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#ddd"/>',
            f'<text x="16" y="{y + 4}">{name}</text>',
            f'<text x="180" y="{y + 4}">{"all" if sent == full else f"1 / {full / sent:.1f}"}</text>',
            f'<circle cx="{x(loss):.1f}" cy="{y}" r="5" fill="#1f77b4"/>',
            f'<text x="{x(loss) + 10:.1f}" y="{y + 4}">{loss:.3f}</text>',
        ]
    note = "band: runs without compression, which differ only by rounding"
    parts.append(f'<text x="{LEFT}" y="{height - 14}" fill="#555">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(
        "| method | MB per step | times fewer | loss | against none |\n|---|---|---|---|---|",
        flush=True,
    )
    if launch(
        2,
        lambda context: measure(context, folder, steps),
        name_of_rank=str,
        hub="none",
        run="bench",
        run_dir=folder,
    ):
        raise SystemExit(1)
    (folder / "compression.svg").write_text(picture(json.loads((folder / "compression.json").read_text())))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 240)
