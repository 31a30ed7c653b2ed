"""Trains models on four ranks, then loads their checkpoints in other layouts and generates text with attention caches;
test_sampling.py compares the results. All computations are in fp64, so that rounding differences are small.

    python -m tests.ranks.models.sampling FOLDER KIND

FOLDER/KIND/GRID.json has the logits of the last stage and the tokens that were generated.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from engine.checkpoint.reading import newest_checkpoint
from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.parallel.mesh import World
from engine.rendezvous import RankContext
from engine.sampling.decoder import Decoder
from engine.sampling.generation import generate
from engine.sampling.settings import Choice, sampling_layout
from engine.train.trainer import Trainer
from tests.ranks.cases.case import LAYOUT, SGD, SMALL, V3
from tests.ranks.cases.over_models import MLA, QWEN3, WINDOW

TRAINED = {
    "latents, dropless experts": [
        *[*SMALL, *MLA, *V3, "model.layers=3", "knobs.capacity_factor=1.0"],
        *["grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.zero=3"],
    ],
    "windows, tied head": [
        *[*SMALL, *QWEN3, *WINDOW, "model.tie_embeddings=true"],
        *["grid.tp=2", "grid.dp_shard=2", "grid.ep=4"],
    ],
}
GRIDS = {
    "one rank": [],
    "tp ep": ["grid.tp=2", "grid.ep=2"],
    "tp": ["grid.tp=2"],  # each tp rank has all experts
    "pp": ["grid.pp=2"],
    "pp tp ep": ["grid.pp=2", "grid.tp=2", "grid.ep=2"],
}
PASSES = (5, 1, 3, 1)  # tokens of each pass; none is a multiple of tp = 2


def begin(context: RankContext, layout: Layout) -> Meter:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    return Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)


def train(context: RankContext, layout: Layout, folder: Path) -> None:
    meter = begin(context, layout)
    Trainer(layout, meter, checkpoints_dir=folder / "checkpoints").run()
    dist.destroy_process_group()


def sample(context: RankContext, trained: Layout, overrides: list[str], folder: Path, name: str) -> None:
    layout = sampling_layout(trained, overrides)
    meter = begin(context, layout)
    world = World(layout.ranks, meter)
    checkpoint = newest_checkpoint(folder)
    decoder = Decoder(layout, world, meter, 2, layout.model.seq_len)
    decoder.load(checkpoint)
    tokens = torch.randint(0, 256, (2, sum(PASSES)), generator=torch.Generator().manual_seed(7))
    parts = [decoder.run(part, last=False) for part in torch.split(tokens, PASSES, 1)]
    logits = torch.cat(
        [part for part in parts if part is not None] or [torch.zeros(0)], 1 if parts[0] is not None else 0
    )
    texts = {}
    for kind, choice in {"greedy": Choice(0), "random": Choice(1.2, top_k=40, top_p=0.9, seed=3)}.items():
        decoder.caches.length = 0
        texts[kind] = generate(decoder, tokens[:, :7], 12, choice).tokens
    if context.rank == world.grid.rank(pp=world.grid.pp - 1):
        row = {"logits": logits.tolist(), "cache": decoder.caches.bytes, **texts}
        (folder / f"{name}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def scenario(world: int, folder: Path, work: object) -> None:
    status = launch(
        world,
        work,  # type: ignore[arg-type]
        name_of_rank=str,
        hub="none",
        run="sampling",
        run_dir=folder,
        preload=("torch", "torch.distributed", "engine.train.trainer", "engine.sampling.decoder"),
    )
    assert status == 0, status


def main(out: Path, kind: str) -> None:
    folder = out / kind
    steps = ["train.lr=3.0", "train.warmup=0", "train.steps=3", "checkpoint.every=3"]
    layout = load(LAYOUT, [*TRAINED[kind], *SGD, *steps])
    scenario(layout.ranks.world, folder, lambda context: train(context, layout, folder))
    for name, grid in GRIDS.items():
        world = sampling_layout(layout, grid).ranks.world
        scenario(
            world,
            folder,
            lambda context, grid=grid, name=name: sample(context, layout, grid, folder, name),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
