"""Runs that save, resume and change knobs; test_resume.py compares their results. All runs are in fp64, so that
rounding differences are small.

    python -m tests.ranks.checkpoint.resume FOLDER SCENARIO ...

The driver imports torch once, runs the scenarios one after another, and forks the ranks of each run. Each run writes
checkpoints, and a `.json` file with losses and gradient norms by step; the last checkpoint has the final parameters and
optimizer state.
"""

import json
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from agents.protocol import Ack, Command, KnobState, Summary, Value
from agents.rank.agent import Agent
from engine.checkpoint.reading import read
from engine.checkpoint.resume_point import with_knob_values
from engine.checkpoint.save import Checkpoints
from engine.checkpoint.storage import DTYPES, Reader
from engine.checkpoint.tensor_index import read_index
from engine.config.layout import Layout
from engine.config.toml import load
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.rendezvous import RankContext
from engine.train.trainer import Trainer
from tests.ranks.cases.case import ADAMW, LAYOUT, SGD, SMALL, TIED, Script
from tests.ranks.cases.over_own_models import GPT
from tests.ranks.parity.trace import Operator, Trace
from tests.ranks.token_shards import SHARDS, in_folders

SIXES = [
    *SMALL,
    "model.layers=4",
    "model.moe.experts=6",
    "model.moe.balance=aux+bias",
    "model.moe.dense_layers=1",
    "model.moe.route_scale=2.5",
    "knobs.bias_rate=0.05",
    "train.weight_decay=0.1",
    "train.grad_clip=0.5",
    *ADAMW,
]
BEGUN = load(
    LAYOUT, [*SIXES, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.steps=10", "checkpoint.every=5"]
)
MOVED: Script = {2: {"expert_placement": "load"}}  # experts have moved before the checkpoint is saved
RESUMED = {
    "tp ep": ["grid.tp=2", "grid.ep=2"],
    "one rank": [],
    # Six experts are sharded over four ranks, so one rank has none.
    "dp 4 zero 3": ["grid.dp_shard=4", "train.zero=3"],
    "cp interleaved": ["grid.pp=2", "grid.cp=2", "schedule.name=interleaved", "schedule.virtual_stages=2"],
}
# Each run resumes from the previous one; in the last run, the embedding and its copy are on one rank.
TIES = {
    "two stages": ["grid.pp=2", "grid.dp_shard=2"],
    "one rank": [],
    "v": ["grid.pp=2", "schedule.name=zbv"],
}
# Validation gathers the averaged weights but does not run the layers of multi-token prediction. The next step must not
# use their averaged weights.
VALIDATED = ["validation.every=1", "validation.source=stdlib", "validation.sequences=8"]
MTP = {
    "zero 3": ["grid.dp_shard=2", "grid.ep=2", "train.zero=3", *VALIDATED],
    "one rank": [],
    "two stages": ["grid.pp=2", "grid.dp_shard=2", *VALIDATED],
}
OWN_MODEL = {
    "two stages": ["grid.pp=2", "grid.dp_shard=2"],
    "zero 3": ["grid.dp_shard=2", "train.zero=3", "knobs.recompute=full"],
    "v replicas": ["grid.pp=2", "grid.dp_replicate=2", "train.zero=0", "schedule.name=zbv"],
}
DATA = [
    *SMALL,
    "model.layers=4",
    *SHARDS,
    *ADAMW,
    "train.steps=8",
    "train.lr_schedule=cosine",
    "train.beta2=0.99",
    "train.ema=0.8",
    "checkpoint.every=4",
    "validation.every=2",
    "validation.shards=SHARDS",
    "validation.sequences=8",
]
DATA_BEGUN = ["grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.zero=1"]
DATA_RESUMED = {
    "one rank": [],
    "dp 2 zero 3": ["grid.dp_shard=2", "grid.ep=2", "train.zero=3", "knobs.recompute=full"],
    "tp zbv": ["grid.tp=2", "grid.pp=2", "schedule.name=zbv"],
}
KNOBS = load(
    LAYOUT,
    [
        *SMALL,
        *SGD,
        "grid.pp=2",
        "grid.dp_shard=2",
        "train.steps=6",
        "checkpoint.every=1",
        "checkpoint.keep=9",
    ],
)
SWITCHED_AT = 3
FICKLE = load(LAYOUT, [*SMALL, *SGD, "grid.pp=2", "grid.dp_shard=2", "grid.ep=2", "train.steps=110"])
SWITCHES = 100


@dataclass
class Run:
    """What a training run reports, such as the loss of each step, for comparison with other runs."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)  # by step
    rates: list[float] = field(default_factory=list)
    revision: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)
    switches: int = 0

    def record(self, summary: Summary) -> None:
        self.steps.append(summary.step)
        self.losses.append(summary.loss)
        self.norms.append(summary.grad_norm)
        self.dropped.append(summary.dropped)
        self.rates.append(summary.lr or 0.0)
        if summary.validation_loss is not None:
            self.validation[summary.step] = summary.validation_loss


# These knobs are excluded, because they act on the whole run.
OF_THE_RUN = ("pause", "resume", "stop", "profile", "profile_rank", "profile_from")


class Fickle(Agent):
    """A fake agent whose operator proposes, at each step, a random legal change to one or more knobs that do not affect
    the loss."""

    def __init__(self, seed: int):
        super().__init__(None, lambda: (0, "", 0.0))
        self.rows: Callable[[], list[KnobState]] = list
        self._random = random.Random(seed)
        self._revision = 0
        self._switched: set[int] = set()

    @property
    def applied(self) -> int:
        return len(self._switched)

    @property
    def pending(self) -> Command | None:
        if self.applied == SWITCHES:
            return None
        rows = [
            row
            for row in self.rows()
            if row.loss_neutral and row.legal.choices and row.name not in OF_THE_RUN
        ]
        several = self._random.sample(rows, self._random.choice([1, 1, 2, len(rows)]))
        changes = {row.name: self._random.choice(row.legal.choices) for row in several}
        self._revision += 1
        return Command(self._revision, f"{self._revision}", changes)

    def settle(self, ack: Ack) -> None:
        # Two values may each be legal but illegal together. In this case all ranks refuse the change. A save is
        # `agreed` at the step boundary and `applied` when it is on disk.
        if ack.state in ("agreed", "applied"):
            self._switched.add(ack.revision)


def train(
    context: RankContext,
    layout: Layout,
    out: Path,
    resume: Path | None = None,
    script: Script | None = None,
    fickle: bool = False,
) -> Run:
    """Train in an initialised process group and return the results; rank 0 also writes them as JSON."""
    run = Run()
    meter = Meter(
        layout.model.prediction_layers.stop,
        layout.model.moe.experts if layout.model.moe else 0,
        context.set_operation,
    )
    agent = Fickle(layout.run.seed) if fickle else Operator(script or {}, meter, Trace())
    trainer = Trainer(
        layout, meter, agent, on_summary=run.record, checkpoints_dir=out / "checkpoints", resume=resume
    )
    if isinstance(agent, Fickle):
        agent.rows = trainer.board.states
    trainer.run()
    run.revision = trainer.board.revision
    run.history = [(applied.revision, applied.step) for applied in trainer.steering.vote.history]
    run.switches = agent.applied if isinstance(agent, Fickle) else 0
    if context.rank == 0:
        out.with_suffix(".json").write_text(json.dumps(vars(run)))
    return run


def resumed(folder: Path) -> None:
    """Train ten steps in one layout, and then the last five of these steps again in other layouts."""
    scenario(BEGUN.ranks.world, folder, lambda context: train(context, BEGUN, folder / "begun", script=MOVED))
    for name, overrides in RESUMED.items():
        layout = load(LAYOUT, [*SIXES, *overrides, "train.steps=10", "checkpoint.every=5"])

        def work(context: RankContext, layout: Layout = layout, name: str = name) -> None:
            train(context, layout, folder / name, folder / "begun/checkpoints/step-5")

        scenario(layout.ranks.world, folder, work)


def shards(folder: Path) -> None:
    """Train eight steps on token shards, with validation and averaged weights. Repeat the last four steps in other
    layouts, and all eight without validation. Then train one step with learning rate 0, and validate on the samples of
    this step."""
    runs: dict[str, tuple[list[str], Path | None]] = {"begun": (DATA_BEGUN, None)}
    runs |= {name: (layout, folder / "begun/checkpoints/step-4") for name, layout in DATA_RESUMED.items()}
    runs["unvalidated"] = ([*DATA_BEGUN, "validation.every=0", "train.ema=none"], None)
    still = ["train.lr=0.0", "train.steps=1", "train.ema=none", "data.weights=none"]
    runs["still"] = ([*DATA_BEGUN, *still], None)
    for name, (overrides, resume) in runs.items():
        layout = load(LAYOUT, in_folders([*DATA, *overrides]))
        script = MOVED if name in ("begun", "unvalidated") else None

        def work(
            context: RankContext,
            layout: Layout = layout,
            name: str = name,
            resume: Path | None = resume,
            script: Script | None = script,
        ) -> None:
            train(context, layout, folder / name, resume, script)

        scenario(layout.ranks.world, folder, work)


def tied(folder: Path) -> None:
    """Run `one_after_the_other` for a model with a tied head."""
    one_after_the_other(folder, [*SIXES, *TIED], TIES)


def mtp(folder: Path) -> None:
    """Run `one_after_the_other` for a model with multi-token prediction."""
    one_after_the_other(folder, [*SIXES, "model.mtp_layers=2", "train.ema=0.8"], MTP)


def own_model(folder: Path) -> None:
    """Run `one_after_the_other` for a user's own model instead of the built-in model."""
    one_after_the_other(folder, [*SMALL, *GPT, *ADAMW, "model.layers=4", "knobs.micro_batches=4"], OWN_MODEL)


def one_after_the_other(folder: Path, model: list[str], layouts: dict[str, list[str]]) -> None:
    """Train each layout up to step 6. The second layout starts from the first one's checkpoint of step 2, the third
    from the second one's checkpoint of step 4."""
    before: Path | None = None
    for n, (name, overrides) in enumerate(layouts.items()):
        layout = load(LAYOUT, [*model, *overrides, "train.steps=6", "checkpoint.every=2"])
        resume = before / f"checkpoints/step-{2 * n}" if before else None

        def work(
            context: RankContext, layout: Layout = layout, name: str = name, resume: Path | None = resume
        ) -> None:
            train(context, layout, folder / name, resume)

        scenario(layout.ranks.world, folder, work)
        before = folder / name


def each_knob(folder: Path) -> None:
    """Run `switched_and_launched` for all knobs of the board."""
    switched_and_launched(folder)


def one_knob(folder: Path) -> None:
    """Run `switched_and_launched` for the capacity factor only."""
    switched_and_launched(folder, only="capacity_factor")


def switched_and_launched(folder: Path, only: str | None = None) -> None:
    """For each knob: one run changes the knob before step SWITCHED_AT, and another run starts at this step with the new
    value."""

    def work(context: RankContext) -> None:
        begun = folder / "knobs"
        train(context, KNOBS, begun)
        meter = Meter(KNOBS.model.layers, 8)
        board = Trainer(KNOBS, meter, Agent(None, lambda: meter.operation)).board
        for knob in board.states():
            if knob.action or (only and knob.name != only):
                continue
            value = another(knob)
            script: Script = {SWITCHED_AT - 1: {knob.name: value}}
            before, at = (begun / f"checkpoints/step-{step}" for step in (SWITCHED_AT - 1, SWITCHED_AT))
            train(context, KNOBS, folder / f"switched-{knob.name}", before, script)
            train(context, with_knob_values(KNOBS, {knob.name: value}), folder / f"launched-{knob.name}", at)

    scenario(KNOBS.ranks.world, folder, work)


def another(knob: KnobState) -> Value:
    """A legal value of `knob` that differs from the knob's current value."""
    others = [choice for choice in knob.legal.choices if choice != knob.value]
    if others:
        return others[-1]
    low, high = knob.legal.low, knob.legal.high
    assert low is not None and high is not None, knob
    half = knob.value / 2 if isinstance(knob.value, int | float) else 0.0
    return max(low, min(high, half or 1.0))


def random_switches(folder: Path) -> None:
    """One run with a hundred knob changes, and the same run without changes."""

    def work(context: RankContext) -> None:
        train(context, FICKLE, folder / "untouched")
        train(context, FICKLE, folder / "fickle", fickle=True)

    scenario(FICKLE.ranks.world, folder, work)


def cut_short(folder: Path) -> None:
    """A run whose save of step 6 never finishes. The run creates the file `writing.RANK` when that save has begun, and
    `step-N` when step N begins."""

    class Slow(Checkpoints):
        def write(self, tensors: dict[str, Tensor], partial: Path) -> dict[str, int]:
            sums = super().write(tensors, partial)
            if partial.name.startswith("step-6"):
                (folder / f"writing.{dist.get_rank()}").touch()
                time.sleep(600)
            return sums

    layout = load(LAYOUT, [*SMALL, *SGD, "grid.dp_shard=2", "train.steps=1000", "checkpoint.every=3"])

    def work(context: RankContext) -> None:
        meter = Meter(2, 8, context.set_operation)
        trainer = Trainer(layout, meter, checkpoints_dir=folder / "run/checkpoints")
        assert trainer.saving.checkpoints
        trainer.saving.checkpoints.__class__ = Slow
        for step in range(layout.train.steps):
            (folder / f"step-{step}").touch()
            trainer.train_step(step)

    scenario(2, folder, work, torch.float32)


def scenario(
    world: int, folder: Path, work: Callable[[RankContext], object], dtype: torch.dtype = torch.float64
) -> None:
    def in_a_group(context: RankContext) -> None:
        torch.set_default_dtype(dtype)
        logging.disable(logging.WARNING)
        dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
        work(context)
        dist.destroy_process_group()

    if launch(world, in_a_group, name_of_rank=str, hub="none", run="resume", run_dir=folder):
        raise SystemExit(1)


def tensors_in(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, unsharded."""
    files = read(checkpoint).manifest.files
    tensors = {
        name: torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for name, stored in read_index(checkpoint, files).items()
    }
    with warnings.catch_warnings(action="ignore"):  # torch warns that there is no process group
        load_tensors(tensors, storage_reader=Reader(checkpoint, files), no_dist=True)
    return tensors


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (resumed, shards, tied, mtp, own_model, one_knob, each_knob, random_switches, cut_short)
}

if __name__ == "__main__":
    torch.set_num_threads(1)  # so that the parent does not start torch's thread pool before it forks
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:]:
        SCENARIOS[name](out)
