"""Trains twice in each layout, with and without generating text; test_live_samples.py compares the results. Except for
the bf16 layout, all computations are in fp64.

    python -m tests.ranks.models.live_samples FOLDER NAME ...

FOLDER/NAME.json contains, for each of the two runs, each rank's meter readings, losses and final state, and the
generated tokens.
"""

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.parallel.local_shards import local_shard
from engine.rendezvous import RankContext
from engine.sampling.decoder import whole_vocabulary
from engine.sampling.training_model import TrainingModel
from engine.sharding.forward_only import ForwardOnly
from engine.train.evaluation import evaluation
from engine.train.text_samples import TextSample
from engine.train.trainer import Trainer
from tests.ranks.cases.case import DROPS, FULL, LAYOUT, SGD, SMALL, TWO_HOPS, V3
from tests.ranks.cases.over_models import MLA, QWEN3, WINDOW

PASSES = (5, 1, 3, 1)  # tokens of each pass; a pass of 1 or 3 tokens is padded if tp = 2
TRAINED = [*SMALL, *V3, *DROPS, *FULL, *SGD, "train.lr=1.0", "train.warmup=0", "train.steps=4"]
SAMPLED = [
    "sample.every=2",
    'sample.prompt="def f(x"',
    "sample.tokens=12",
    "sample.temperature=0.8",
    "sample.seed=1",
]
FOUR = ["model.layers=4", "knobs.micro_batches=4"]
LAYOUTS: dict[str, list[str]] = {
    "zero 3": ["grid.dp_shard=2", "grid.ep=2", "train.zero=3", "train.ema=0.5", "train.steps=3"],
    "one rank": FOUR,
    "zbv tp": [*FOUR, "grid.pp=2", "grid.tp=2", "grid.ep=2", "schedule.name=zbv", "knobs.recompute=none"],
    "interleaved dp": [*FOUR, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "schedule.name=interleaved"],
    "cp ring tp": [*FOUR, "grid.cp=2", "grid.tp=2", "grid.ep=2", "train.zero=1"],
    "cp ulysses pp": [*FOUR, "grid.cp=2", "grid.cp_method=ulysses", "grid.pp=2", "grid.ep=2", "train.zero=2"],
    "replicas, two hops": [
        *["model.layers=4", "grid.dp_replicate=2", "grid.dp_shard=4", "grid.ep=4", *TWO_HOPS],
        "knobs.micro_batches=1",
    ],
    "mla, one rank": [*FOUR, *MLA],
    "mla cp tp": [*FOUR, *MLA, "grid.cp=2", "grid.tp=2", "grid.ep=4", "train.zero=3"],
    "tied window, one rank": [*FOUR, *QWEN3, *WINDOW, "model.tie_embeddings=true"],
    "tied window pp tp": [
        *[*FOUR, *QWEN3, *WINDOW, "model.tie_embeddings=true", "grid.pp=2", "grid.tp=2", "grid.ep=2"],
        "data.separate_documents=true",
    ],
    "compiled": [*FOUR, "grid.tp=2", "grid.ep=2", "train.compile=true"],
    "bf16": [*FOUR, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.precision=bf16"],
}  # fmt: skip


def train(layout: Layout, context: RankContext) -> tuple[dict[str, Any], Trainer]:
    """Train in one layout. Returns two values: a dictionary with this rank's results, and the trainer. The results
    include the meter's readings after each step, on rank 0 the loss of each step, and a digest of the final weights.
    """
    torch.manual_seed(7)
    np.random.seed(7)
    meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
    readings: list[Any] = []
    losses: list[Any] = []
    samples: list[TextSample] = []

    def read(_: object) -> None:
        now = meter.readings
        lanes = {axis: lane.bytes for axis, lane in now.lanes.items()}
        readings.append([now.load.tolist(), now.dropped.tolist(), lanes, now.a2a_to, len(now.spans)])

    trainer = Trainer(
        layout,
        meter,
        on_step=read,
        on_summary=lambda summary: losses.append([summary.loss, summary.grad_norm, summary.dropped]),
        on_sample=samples.append,
    )
    trainer.run()
    digest = hashlib.sha256()
    for stage in trainer.stages:
        for _, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            digest.update(local_shard(tensor.detach()).double().numpy().tobytes())
    row = {
        "readings": readings,
        "losses": losses,
        "state": digest.hexdigest(),
        "random": [torch.rand(1).item(), np.random.random()],
        "steps": [sample.step for sample in samples],
        "tokens": [sample.report.done.tokens[0] for sample in samples],
        "cache": [[sample.report.cache_bytes, sample.report.formula] for sample in samples],
    }
    return row, trainer


def largest_difference(trainer: Trainer, layout: Layout) -> float:
    """The largest difference between the logits of passes that use the attention caches and those of one forward pass
    over the whole text. Returns 0 on ranks that have no logits, and on all ranks if cp > 1, because each rank then has
    only some of the text's tokens.
    """
    tokens = torch.randint(0, 256, (1, layout.model.seq_len), generator=torch.Generator().manual_seed(7))
    for stage in trainer.stages:
        stage.eval()
    eager = torch.compiler.set_stance("force_eager")
    with eager, evaluation(trainer.computation, trainer.meter, capacity_factor=None):
        model = TrainingModel(layout, trainer.stages, trainer.world, layout.model.seq_len)
        parts = [model.run(part) for part in torch.split(tokens[:, : sum(PASSES)], PASSES, 1)]
        if layout.grid.cp > 1:
            return 0.0
        whole = ForwardOnly(layout, trainer.stages, trainer.world).run(tokens)
    if whole is None:
        return 0.0
    found = torch.cat([part for part in parts if part is not None], 1)
    last = [end - 1 for end in itertools.accumulate(PASSES)]
    return float((found - whole_vocabulary(whole, trainer.world.tp)[:, last]).abs().max())


def work(context: RankContext, name: str, folder: Path) -> None:
    if name != "bf16":
        torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    plain, sampled = (load(LAYOUT, [*TRAINED, *LAYOUTS[name], *extra]) for extra in ([], SAMPLED))
    with_text, trainer = train(sampled, context)
    mine = {"plain": train(plain, context)[0], "sampled": with_text}
    mine["sampled"]["difference"] = largest_difference(trainer, sampled)
    rows: list[Any] = [None] * context.world
    dist.all_gather_object(rows, mine)
    if context.rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        status = launch(
            load(LAYOUT, [*TRAINED, *LAYOUTS[name]]).ranks.world,
            lambda context, name=name: work(context, name, folder),
            name_of_rank=str,
            hub="none",
            run="samples",
            run_dir=folder,
            preload=("torch", "torch.distributed", "engine.train.trainer"),
        )
        assert status == 0, (name, status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
