"""Runs all checks of a layout. Each refusal is one sentence: the key, its value, the reason, the legal values."""

from collections.abc import Iterator

from engine.config.checks.model_checks import model_refusals
from engine.config.checks.partition_checks import context_refusals, divisor_refusals, expert_grid_refusals
from engine.config.checks.pipeline_checks import pipeline_refusals
from engine.config.checks.training_checks import (
    data_refusals,
    learning_rate_refusals,
    sample_refusals,
    train_refusals,
    validation_refusals,
)
from engine.config.layout import Layout
from engine.config.sections.assumptions import MODULES
from engine.config.sizes import parameter_count

# Limits above the sizes of all published runs. A mistyped number is refused here, before it causes a traceback later.
MOST_RANKS = 65_536  # four times the 16,384 GPUs of Llama 3
MOST_PARAMETERS = 10**13  # six times the 1.6 trillion parameters of Switch-C
MOST_TOKENS = 2**30  # per step: sixteen times the 15,360 sequences of 4,096 tokens of DeepSeek-V3


def refusals(layout: Layout) -> Iterator[str]:
    """Yield a refusal for each mistake in the layout; none if the layout is legal."""
    yield from size_refusals(layout)
    yield from divisor_refusals(layout)
    if refusal := layout.ranks.refusal():
        yield refusal
    if layout.grid.cp > 1:
        yield from context_refusals(layout)
    yield from model_refusals(layout)
    yield from expert_grid_refusals(layout)
    yield from train_refusals(layout)
    yield from learning_rate_refusals(layout.train)
    yield from data_refusals(layout)
    yield from validation_refusals(layout)
    yield from sample_refusals(layout)
    yield from pipeline_refusals(layout)
    yield from plan_refusals(layout)


def advice(layout: Layout) -> Iterator[str]:
    """Yield warnings about legal values that are probably mistakes, one sentence each."""
    train = layout.train
    if train.warmup > train.steps:
        yield (
            f"train.warmup = {train.warmup} is longer than train.steps = {train.steps}: the learning rate does not "
            f"reach train.lr = {train.lr:g}"
        )


def size_refusals(layout: Layout) -> Iterator[str]:
    """Refuse a layout whose number of ranks, tokens per batch or number of parameters is larger than in any published
    run. This check runs first, so that later checks stay fast."""
    tokens = layout.train.global_batch * layout.model.seq_len
    parameters = 0 if layout.model.own else parameter_count(layout.model)
    for what, size, most in (
        ("pp x dp_replicate x dp_shard x cp x tp of [grid]", layout.ranks.world, MOST_RANKS),
        ("train.global_batch x model.seq_len", tokens, MOST_TOKENS),
        ("the number of the model's parameters", parameters, MOST_PARAMETERS),
    ):
        if size > most:
            yield f"{what} = {size:,} is larger than in any published run; legal: up to {most:,}"


def plan_refusals(layout: Layout) -> Iterator[str]:
    """Refuse illegal or contradictory settings in the sections [plan] and [hardware] of a layout."""
    machine, plan = layout.hardware, layout.plan
    if machine.name and machine.path:
        yield f"hardware.name = {machine.name} and hardware.path = {machine.path} are both given; legal: one of them"
    if plan.split is not None and (len(plan.split), sum(plan.split)) != (layout.stages, layout.model.layers):
        yield (
            f"plan.split has {len(plan.split)} numbers with the sum {sum(plan.split)}; legal: one for each "
            f"of the {layout.stages} stages, with the sum model.layers = {layout.model.layers}"
        )
    if plan.recomputed and {*plan.recomputed.split("+")} - {*MODULES}:
        yield (
            f"plan.recomputed = {plan.recomputed} is not legal; legal: {', '.join(MODULES)}, several joined by +, or "
            "none"
        )
    if plan.recomputed and (plan.framework != "megatron" or layout.knobs.recompute != "none"):
        yield (
            f"plan.recomputed = {plan.recomputed} requires plan.framework = megatron and knobs.recompute = none; "
            "legal: both, or plan.recomputed = none"
        )
