"""The parity harness: compares the loss, the unclipped gradient norm and every gradient of a layout with those of one
process.

The reference is the whole model on one rank, without process group, FSDP and pipeline, in a single micro-batch. A
driver imports torch once and forks the ranks of one case after the other:

    python -m tests.ranks.parity FOLDER [NAME ...]

With `make parity`, all cases run STEPS steps. `make test` runs only the cases in QUICK, and only as many steps as their
scripts need.

Tolerances are derived, not tuned. In fp64 only rounding (1e-16 per operation) may differ, so after 20 steps every
gradient agrees to 1e-11, and a wrong scale is detected at once. In fp32, rounding errors grow over the steps, so the
tolerance is measured on one process: the reference is run JOLTS more times with each initial weight changed by half a
unit in the last place (2^-24 relative, random sign). A layout may differ by MARGIN times the largest difference of
these runs up to that step. In bf16 the margin is smaller: half a unit of bf16 in each weight changes the results more
than adding the same numbers in another order.

Rounding may also change the router's choice between two almost equal scores (about one decision in a million). The
expert loads show this: from that step on, the two runs differ but are equally valid, so only loss and norm are
compared, with the tolerances FLIPPED. The same cases in fp64 have no such steps. In bf16 such a change of choice
happens at every step, so in bf16 cases the position of a token in its sequence selects its experts in all runs
(`fix_routing`), and all steps are compared.
"""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agents.protocol import Ack, Command, Event, Message, Value
from agents.rank.agent import Agent
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.learning_rate import learning_rate
from engine.control import expert_placement
from engine.launch.processes.local_ranks import launch
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.transformer import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.rendezvous import RankContext
from engine.sharding.expert_rows import moe_layers
from engine.sharding.fsdp import EMBEDDING, named_parameters
from engine.train.corpus import read_text
from engine.train.data import Samples
from engine.train.trainer import Trainer
from tests.ranks.case import SMALL, Case, Script
from tests.ranks.cases import CASES, STEPS, steps_of
from tests.ranks.routing import fix_routing

JOLTS = 3
MARGIN = {"fp32": 8.0, "bf16": 2.0, "fp16": 2.0}
ROUNDED = {"bf16": torch.bfloat16, "fp16": torch.float16}  # precisions of activations below fp32
FP64_TOLERANCE = 1e-11
HALF_UNIT = {
    "fp32": 2.0**-24,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
}  # half a unit in the last place, relative to the value
# Tolerances for runs in which about one token in some thousands goes to another expert.
FLIPPED = {"loss": 1e-3, "norm": 1e-2}


@dataclass
class Trace:
    """The results of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)  # [layer, expert]
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    maps: list[dict[int, list[int]]] = field(
        default_factory=list
    )  # where experts were: layer -> slot -> expert
    biases: list[dict[str, Tensor]] = field(default_factory=list)  # biases of the routers, after the update
    embeddings: dict[str, Tensor] = field(default_factory=dict)  # the embedding's weight after the last step
    acks: list[Ack] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    knobs: dict[str, Value] = field(default_factory=dict)


class Operator(Agent):
    """An agent without a hub; on the leader it proposes the changes of a script."""

    def __init__(self, script: Script, meter: Meter, trace: Trace):
        super().__init__(None, lambda: meter.operation)
        self._script, self._meter, self._trace = script, meter, trace

    @property
    def pending(self) -> Command | None:
        changes = self._script.get(self._meter.step)
        return Command(self._meter.step, f"at {self._meter.step}", changes) if changes else None

    def settle(self, ack: Ack) -> None:
        self._trace.acks.append(ack)

    def send(self, *messages: Message) -> None:
        self._trace.events += [message.text for message in messages if isinstance(message, Event)]


def one_process(layout: Layout, script: Script, steps: int, jolt: int | None = None) -> Trace:
    """The reference run. It applies the changes of `script` that affect the loss, and ignores loss-neutral knobs.

    If `jolt` is given, it is the seed of a random change of each initial weight by half a unit in the last place of the
    precision.
    """
    meter = Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)
    tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
    train, model = layout.train, layout.model
    knob_values = replace(KnobValues.of(layout), recompute="none")
    stage = Stage(ParameterFactory(layout.run.seed, tp, ep), model, range(model.layers), knob_values, meter)
    if jolt is not None:
        coin = torch.Generator().manual_seed(jolt)
        with torch.no_grad():
            for p in stage.parameters():
                half_up = torch.randint(0, 2, p.shape, generator=coin, dtype=torch.float64)
                p.copy_(p.double() * (1.0 + HALF_UNIT[train.precision] * (2.0 * half_up - 1.0) * 1.01))
    samples = Samples(read_text(layout), model.seq_len, train.global_batch, layout.run.seed)
    rounded = ROUNDED.get(train.precision)
    if rounded:
        fix_routing([stage])
    # With fp16, the reference multiplies all losses by the layout's first scale in every step.
    knob_values.loss_scale = scale = layout.loss_scale.initial if train.precision == "fp16" else 1.0
    weights = {name: nn.Parameter(p.detach().clone()) for name, p in stage.named_parameters()}
    if rounded:
        for p in stage.parameters():
            p.data = p.data.to(rounded)
    matrices = [p for p in weights.values() if p.ndim > 1]
    vectors = [p for p in weights.values() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if train.optimizer == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.lr)
    else:
        optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps)
    trace = Trace()
    for step in range(steps):
        meter.start_step(step)
        tokens, targets = samples.batch(step, 0, train.global_batch)
        for name, p in stage.named_parameters():
            p.data.copy_(weights[name].data)
        loss = cross_entropy(stage(tokens), targets, tp) / targets.numel()
        (loss * scale).backward()
        trace.losses.append(float(loss.detach()))
        for name, p in stage.named_parameters():
            weights[name].grad, p.grad = whole(p.grad).to(weights[name].dtype) / scale, None
        trace.grads.append({name: whole(p.grad) for name, p in weights.items()})
        parameters = list(weights.values())
        most = float("inf") if knob_values.grad_clip is None else knob_values.grad_clip
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, most)))
        trace.dropped.append(int(meter.readings.dropped.sum()))
        trace.loads.append(meter.readings.load)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(train, step, knob_values.lr_scale)
        optimizer.step()
        optimizer.zero_grad()
        biases = router_biases(stage)
        for name, bias in biases.items():
            for expert, load in enumerate(counts := meter.readings.load[int(name.split(".")[1])].tolist()):
                mean = sum(counts) / len(counts)
                bias[expert] += knob_values.bias_rate * ((load < mean) - (load > mean))
        trace.biases.append({name: bias.clone() for name, bias in biases.items()})
        for knob, value in script.get(step, {}).items():
            if knob in vars(knob_values) and knob != "recompute":
                setattr(knob_values, knob, value)
    return trace


def as_laid_out(context: RankContext, layout: Layout, script: Script, steps: int, out: Path) -> None:
    """The same run as `one_process`, but on the ranks of `layout`. The first rank of each stage saves its part of the
    trace."""
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    meter = Meter(
        layout.model.layers, layout.model.moe.experts if layout.model.moe else 0, context.set_operation
    )
    trace = Trace()
    trainer = Trainer(layout, meter, Operator(script, meter, trace))
    if layout.train.precision in ROUNDED:
        fix_routing(trainer.stages)
    if script and context.rank == 5:
        trainer.board.prepare = lambda changes, prepare=trainer.board.prepare: (
            _only_small(changes) or prepare(changes)
        )
    if context.rank == 1:
        expert_placement.Move = _no_room_at_first(expert_placement.Move)
    for step in range(steps):
        meter.start_step(step)
        trainer.steering.vote.begin(step, stop=False)
        loss = trainer.computation.forward_backward(step)
        mine = torch.tensor(
            [trainer.computation.counted_loss(loss), float(meter.readings.dropped.sum())], dtype=torch.float64
        )
        total = trainer.world.control.all_gather(mine).sum(0)
        trace.losses.append(float(total[0]))
        trace.dropped.append(int(total[1]))
        trace.loads.append(trainer.world.control.all_gather(meter.readings.load).sum(0))
        trace.grads.append(logical(trainer))
        trace.maps.append({n: layer.placement.logical for n, layer in moe_layers(trainer.stages).items()})
        trace.norms.append(norm := trainer.computation.gradient_norm())
        trainer.computation.update(step, norm)
        biases = (router_biases(stage) for stage in trainer.stages)
        trace.biases.append({name: bias.clone() for stage in biases for name, bias in stage.items()})
        trainer.steering.vote.end(step)
    for name, p in named_parameters(trainer.stages):
        if name == EMBEDDING:
            alike(trace.embeddings, {name: whole(p.detach())})
    trace.knobs = trainer.board.values
    at = trainer.world.coords
    if at["dp"] == at["cp"] == at["tp"] == 0:
        torch.save(trace, out / f"stage{at['pp']}.pt")
    dist.destroy_process_group()


def router_biases(stage: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in stage.named_buffers() if name.endswith("router.bias")}


def _only_small(changes: dict[str, Value]) -> None:
    """Make this rank refuse 16 micro-batches, to simulate that only this rank is out of memory."""
    if changes.get("micro_batches") == 16:
        raise ValueError("this rank has no room for 16 micro-batches")


def _no_room_at_first(move: Callable[..., object]) -> Callable[..., object]:
    """Make the first move of experts fail on this rank, before anything is sent."""
    calls: list[object] = []

    def refuse_once(*args: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise MemoryError("this rank has no room for experts")
        return move(*args)

    return refuse_once


def whole(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor().clone() if isinstance(grad, DTensor) else grad.clone()


def logical(trainer: Trainer) -> dict[str, Tensor]:
    """All gradients, as whole tensors. Experts are in the order of their logical numbers, whatever their placement."""
    grads: dict[str, Tensor] = {}
    for name, p in named_parameters(trainer.stages):
        alike(grads, {name: whole(p.grad)})
    for n, layer in moe_layers(trainer.stages).items():
        slots = torch.tensor(layer.placement.logical).argsort()
        for name, _ in layer.experts.named_parameters():
            grads[f"layers.{n}.mlp.experts.{name}"] = grads[f"layers.{n}.mlp.experts.{name}"][slots]
    return grads


def alike(tensors: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add `more` to `tensors`. A tensor that is in both (a tied embedding) must be bit-identical."""
    for name in tensors.keys() & more.keys():
        assert torch.equal(tensors[name], more[name]), f"copies of {name} differ"
    tensors |= more


def merged(folder: Path) -> Trace:
    """Merge the traces of all stages into the trace of the whole model."""
    stages = [torch.load(path, weights_only=False) for path in sorted(folder.glob("stage*.pt"))]
    trace: Trace = stages[0]
    for other in stages[1:]:
        assert [ack.digest for ack in other.acks] == [
            ack.digest for ack in trace.acks if ack.state == "applied"
        ], "ranks hold different knobs"
        assert other.losses == trace.losses and other.norms == trace.norms, "ranks disagree on loss or norm"
        for grads, more in zip(trace.grads, other.grads, strict=True):
            alike(grads, more)
        alike(trace.embeddings, other.embeddings)
        for maps, others in zip(trace.maps, other.maps, strict=True):
            maps |= others
        for biases, more in zip(trace.biases, other.biases, strict=True):
            biases |= more
    return trace


def distance(a: Trace, b: Trace) -> dict[str, list[float]]:
    """Relative differences by step: that of the loss, that of the norm, and the largest one among the gradients of all
    parameters.

    The difference of a gradient is relative to the larger of its norm and 1e-3 of the whole gradient's norm. The
    rounding error of a sum is relative to its terms, so a gradient whose terms almost cancel has a large error relative
    to its own norm.
    """
    assert all(x.keys() == y.keys() for x, y in zip(a.grads, b.grads, strict=True)), "other parameters"
    return {
        "loss": [abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)],
        "norm": [abs(x - y) / abs(y) for x, y in zip(a.norms, b.norms, strict=True)],
        "gradient": [
            max(float((x[n] - y[n]).norm() / y[n].norm().clamp_min(1e-3 * norm)) for n in y)
            for x, y, norm in zip(a.grads, b.grads, b.norms, strict=True)
        ],
    }


def same_routing(a: Trace, b: Trace) -> int:
    """The number of steps before the first step in which loads or biases of experts differ between the two runs."""
    same = [
        torch.equal(load, other) and all(torch.equal(mine[n], theirs[n]) for n in theirs)
        for load, other, mine, theirs in zip(a.loads, b.loads, a.biases, b.biases, strict=True)
    ]
    return same.index(False) if False in same else len(same)


# ------------------------------------------------------------------------------------------------- the driver


def run_case(case: Case, folder: Path, steps: int = STEPS) -> None:
    """Run `case` and write its `result.json`: differences by step, and, in fp32 and bf16, the differences that rounding
    alone causes."""
    layout = case.layout
    dtype = torch.float64 if case.fp64 else torch.float32

    def reference(context: RankContext) -> None:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(1)  # with two threads, ranks that share cores would slow each other down
        folder.mkdir(parents=True, exist_ok=True)
        truth = one_process(layout, case.script, steps)
        jolted = [] if case.fp64 else [one_process(layout, case.script, steps, seed) for seed in range(JOLTS)]
        rounding = [(same_routing(jolt, truth), distance(jolt, truth)) for jolt in jolted]
        torch.save((truth, rounding), folder / "truth.pt")

    def laid_out(context: RankContext) -> None:
        torch.set_default_dtype(dtype)
        logging.disable(logging.WARNING)  # torch prints a warning for each gather in full_tensor
        as_laid_out(context, layout, case.script, steps, folder)

    def compare(context: RankContext) -> None:
        truth, jolted = torch.load(folder / "truth.pt", weights_only=False)
        trace = merged(folder)
        rounding = {
            what: [
                max((jolt[what][step] for same, jolt in jolted if step < same), default=0.0)
                for step in range(steps)
            ]
            for what in ("loss", "norm", "gradient")
            if jolted
        }
        result = {
            "distance": distance(trace, truth),
            "rounding": rounding,
            "same_routing": same_routing(trace, truth),
            "dropped": trace.dropped,
            "dropped_in_one_process": truth.dropped,
            "losses": trace.losses,
            "events": trace.events,
            "placed": [sum(m != sorted(m) for m in maps.values()) for maps in trace.maps],
            "acks": [[ack.revision, ack.state, ack.step, ack.why] for ack in trace.acks],
            "knobs": trace.knobs,
        }
        (folder / "result.json").write_text(json.dumps(result))
        for saved in folder.glob("*.pt"):
            saved.unlink()

    for world, work in ((1, reference), (layout.ranks.world, laid_out), (1, compare)):
        name_of_rank = layout.ranks.name if world > 1 else str
        if launch(world, work, name_of_rank=name_of_rank, hub="none", run="parity", run_dir=folder):
            raise SystemExit(1)


def report(folder: Path, names: list[str]) -> str:
    """The results of the cases in `folder` as a Markdown table."""
    lines = [
        "| case | ranks | overrides of the demo | | loss | norm | gradient | allowed | steps | drops a step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        case, result = CASES[name], json.loads((folder / name / "result.json").read_text())
        same = result["same_routing"]
        worst = [max(result["distance"][what][:same], default=0.0) for what in ("loss", "norm", "gradient")]
        precision = "fp64" if case.fp64 else case.layout.train.precision
        allowed = FP64_TOLERANCE
        if not case.fp64:
            allowed = MARGIN[precision] * max(result["rounding"]["gradient"][:same])
        figures = " | ".join(f"{figure:.1e}" for figure in (*worst, allowed))
        drops = f"{sum(result['dropped']) / len(result['dropped']):.0f}" if any(result["dropped"]) else "none"
        world = case.layout.ranks.world
        overrides = " ".join(case.overrides).replace(" ".join(SMALL), "*small*")
        overrides = overrides if case.of == "demo" else f"*{case.of}* {overrides}"
        lines.append(f"| {name} | {world} | {overrides} | {precision} | {figures} | {same} | {drops} |")
    return "\n".join([*lines, "", f"*small* is `{' '.join(SMALL)}`."]) + "\n"


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)  # the parent forks, so it must not have started torch's thread pool
    for name in names or CASES:
        run_case(CASES[name], folder / name, steps_of(name) if names else STEPS)
    sys.stdout.write(report(folder, names or list(CASES)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
