"""Loss against bytes for each method of gradient compression: one demo run with two replicas for each.

    python -m tests.bench.compression FOLDER [STEPS]

Writes the losses of all runs to FOLDER/compression.json and prints the table of docs/train/compression.md.
"""

import json
import sys
from pathlib import Path

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
    "int8": ["method=int8"],
    "top_k 10 %": ["method=top_k", "ratio=0.1"],
    "top_k 1 %": ["method=top_k", "ratio=0.01"],
    "power_sgd 4": ["method=power_sgd", "rank=4"],
    "bf16": ["method=bf16"],
    "random_k 10 %": ["method=random_k", "ratio=0.1"],
    "threshold 3": ["method=threshold", "threshold=3.0"],
    "fp16": ["method=fp16"],
}


def measure(context: RankContext, folder: Path, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    found: dict[str, dict[str, list[float]]] = {}
    for name, settings in RUNS.items():
        layout = load(
            LAYOUT,
            [
                *TWO_REPLICAS,
                *SMALL_BATCH,
                f"train.steps={steps}",
                *(f"compression.{setting}" for setting in settings),
            ],
        )
        meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
        agent = Agent(None, lambda meter=meter: meter.operation)
        losses: list[float] = []
        sent: list[float] = []
        times: list[float] = []

        def note(summary: Summary, losses: list[float] = losses, times: list[float] = times) -> None:
            losses.append(summary.loss or 0.0)
            times.append(summary.step_ms)

        with Trainer(layout, meter, agent, on_summary=note) as trainer:
            for step in range(steps):
                trainer.train_step(step)
                sent.append(meter.readings.replica_bytes)
        found[name] = {"loss": losses, "bytes": sent, "ms": times}
        if context.rank == 0:
            print(row(name, found[name], found["none"]), flush=True)
            (folder / "compression.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def row(name: str, run: dict[str, list[float]], plain: dict[str, list[float]]) -> str:
    """A row of the table. The loss is the mean of the last 20 steps; the bytes are those of one rank, mean per step."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    sent, full = mean(run["bytes"]), mean(plain["bytes"])
    loss, base = mean(run["loss"][-20:]), mean(plain["loss"][-20:])
    median = sorted(run["ms"])[len(run["ms"]) // 2]
    return f"| `{name}` | {sent / 1e6:.3f} | {full / sent:.1f} | {loss:.4f} | {loss - base:+.4f} | {median:.0f} |"


def main(folder: Path, steps: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    print(
        "| method | MB a step | times fewer | loss | against none | ms a step |\n|---|---|---|---|---|---|",
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 240)
