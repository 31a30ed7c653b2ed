"""Runs with compressed gradients; test_compression.py compares their results. The runs are in fp64, so that rounding
differences are small.

python -m tests.ranks.compression FOLDER SCENARIO ...
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist

from agents.protocol import Value
from engine.config.layout import Layout
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.parallel.local_shards import local_shard
from engine.rendezvous import RankContext
from engine.sharding.fsdp import named_parameters
from engine.train.trainer import Trainer
from tests.ranks.cases.case import ADAMW, LAYOUT, SMALL, Script
from tests.ranks.checkpoint.resume import scenario, train
from tests.ranks.compression.settings import QUICK, RESUMED, SETTINGS, SMALLER
from tests.ranks.parity.trace import Operator, Trace

HSDP = ["grid.dp_replicate=2", "grid.dp_shard=2", "grid.ep=2", "model.vocab=257", "train.grad_clip=0.5"]
STEPS = 5


def layout_of(settings: list[str], *overrides: str) -> Layout:
    compression = [f"compression.{setting}" for setting in settings]
    return load(
        LAYOUT,
        [
            *SMALL,
            *ADAMW,
            f"train.steps={STEPS + 1}",
            "checkpoint.every=1",
            "checkpoint.keep=9",
            "compression.min_elements=64",
            *overrides,
            *compression,
        ],
    )


def stepped(layout: Layout, context: RankContext, script: Script | None = None) -> dict[str, object]:
    """Train STEPS steps. For each step, returns the trainer's gradient norm, the gradient norm of each replica computed
    here for comparison, and a digest of this rank's weights after the step."""
    meter = Meter(layout.model.layers, 8, context.set_operation)
    trainer = Trainer(layout, meter, Operator(script or {}, meter, Trace()))
    world, norms, by_hand, digests = trainer.world, [], [], []
    for step in range(STEPS):
        meter.start_step(step)
        trainer.steering.vote.begin(step, stop=False)
        trainer.computation.forward_backward(step)
        norms.append(norm := trainer.computation.gradient_norm())
        squares = sum(local_shard(p.grad).square().sum() for _, p in named_parameters(trainer.stages))
        within = world.control.all_gather(torch.as_tensor(squares)).view(world.replicas.size, -1)
        by_hand.append([float(replica.sqrt()) for replica in within.sum(1)])
        trainer.computation.update(step, norm)
        trainer.steering.vote.end(step)
        raw = b"".join(local_shard(p.detach()).numpy().tobytes() for _, p in named_parameters(trainer.stages))
        digests.append(hashlib.blake2b(raw, digest_size=8).hexdigest())
    return {"norms": norms, "by hand": by_hand, "digests": digests, "rank": context.rank}


def quick(folder: Path) -> None:
    """Run each method in QUICK on two replicas of two ranks, and one run that changes its method at every step."""

    def work(context: RankContext) -> None:
        found = compared(context, QUICK)
        changes: list[dict[str, Value]] = [
            {"compression": "power_sgd"},
            {"compression": "top_k", "compression_ratio": 0.2},
            {"compression": "none"},
        ]
        turned = stepped(layout_of([], *HSDP), context, dict(enumerate(changes)))
        (folder / f"{context.rank}.json").write_text(json.dumps(found | {"turned": turned}))

    scenario(4, folder, work)


def others(folder: Path) -> None:
    """Run the methods that are not in QUICK, on two replicas of two ranks."""

    def work(context: RankContext) -> None:
        found = compared(context, [name for name in SETTINGS if name not in QUICK])
        (folder / f"{context.rank}.json").write_text(json.dumps(found))

    scenario(4, folder, work)


def compared(context: RankContext, names: Iterable[str]) -> dict[str, object]:
    return {name: stepped(layout_of(SETTINGS[name], *HSDP), context) for name in names}


def moved(context: RankContext, folder: Path) -> None:
    """Move experts, and write three counts of the experts' residuals to moved.json: those whose values the move
    changed, those that it put on another rank, and those that were not zero before the move."""
    layout = layout_of(SETTINGS["top_k"], *HSDP)
    meter = Meter(layout.model.layers, 8)
    trainer = Trainer(layout, meter, Operator({}, meter, Trace()))
    for step in range(2):
        trainer.train_step(step)
    placement = trainer.computation.expert_placement
    assert placement
    placement.request = "load"
    before, after = residuals_by_rank(trainer), placement.carry_out() and residuals_by_rank(trainer)
    assert after
    trainer.close()
    where = [{key: rank for rank, held in enumerate(ranks) for key in held} for ranks in (before, after)]
    values = [{key: value for held in ranks for key, value in held.items()} for ranks in (before, after)]
    assert values[0].keys() == values[1].keys()
    changed = sum(not torch.equal(values[0][key], values[1][key]) for key in values[0])
    elsewhere = sum(where[0][key] != where[1][key] for key in where[0])
    nonzero = sum(bool(value.any()) for value in values[0].values())
    if context.rank == 0:
        (folder / "moved.json").write_text(json.dumps([changed, elsewhere, nonzero]))


def residuals_by_rank(trainer: Trainer) -> list[dict[str, torch.Tensor]]:
    """The compression residuals of the experts on each rank, by tensor name."""
    tensors = trainer.saving._state().tensors()
    mine = {k: t.clone() for k, t in tensors.items() if k.startswith("residual") and ".experts." in k}
    by_rank: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return by_rank


def resumed(folder: Path) -> None:
    """Train with each method in RESUMED, and again from a checkpoint of that run in the same layout. A checkpoint of
    the run with top_k is also resumed on two ranks, in each layout in SMALLER. In another run with top_k, experts are
    moved to other ranks (`moved`)."""

    def work(context: RankContext) -> None:
        for name in RESUMED:
            layout = layout_of(SETTINGS[name], *HSDP)
            train(context, layout, folder / f"{name} whole")
            checkpoint = folder / f"{name} whole/checkpoints/step-4"
            train(context, layout, folder / f"{name} again", checkpoint)
        moved(context, folder)

    scenario(4, folder, work)
    before = folder / "top_k whole/checkpoints/step-4"
    for name, overrides in SMALLER.items():
        settings = SETTINGS["top_k"] if "no" not in name else []
        layout = layout_of(settings, "model.vocab=257", "train.grad_clip=0.5", *overrides)

        def smaller(context: RankContext, layout: Layout = layout, name: str = name) -> None:
            meter = Meter(layout.model.layers, 8)
            trainer = Trainer(layout, meter, Operator({}, meter, Trace()), resume=before)
            compression = trainer.computation.shards.compression
            state = trainer.saving._state()
            sums = {}
            for parameter_name, parameter in state.named_parameters():
                own = compression.residual(parameter).double().sum()
                sums[parameter_name] = float(trainer.world.control.all_gather(own.reshape(1)).sum())
            if context.rank == 0:
                (folder / f"{name}.json").write_text(json.dumps(sums))
            trainer.train_step(4)
            trainer.close()

        scenario(2, folder, smaller)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[2:]:
        {"quick": quick, "others": others, "resumed": resumed}[chosen](Path(sys.argv[1]))
