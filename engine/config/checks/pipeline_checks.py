"""Checks of the pipeline schedule: stages, micro-batches, and settings that a schedule does not support."""

from collections.abc import Iterator

from engine.config.checks.legal_values import can_compile, legal_micro_batches
from engine.config.grid import listed, up_to
from engine.config.layout import Layout
from engine.config.schedule_traits import (
    SCHEDULES,
    accepts_micro_batches,
    compatible_zero_stages,
    legal_recompute,
    min_micro_batches,
)


def pipeline_refusals(layout: Layout) -> Iterator[str]:
    pp, name, layers = layout.grid.pp, layout.schedule.name, layout.model.layers
    traits, given = SCHEDULES[name], layout.schedule.virtual_stages
    if given and (given < 2 if traits.virtual_stages is None else given != traits.virtual_stages):
        legal = traits.virtual_stages or "at least 2"
        yield f"schedule.virtual_stages = {given} does not suit schedule.name = {name}; legal: {legal}"
    if pp == 1 and traits.virtual_stages != 1:
        yield f"schedule.name = {name} needs a pipeline, but grid.pp = 1; legal: gpipe, 1f1b, or grid.pp at least 2"
    if pp > layers:
        yield (
            f"grid.pp = {pp} is more stages than model.layers = {layers}; legal: {up_to(layers)}, or "
            f"model.layers at least {pp}"
        )
    elif layout.stages > layers:
        yield (
            f"grid.pp = {pp} x {layout.virtual_stages} virtual stages of schedule.name = {name} are more stages than "
            f"model.layers = {layers}; legal: a product of at most {layers}, or model.layers at least {layout.stages}"
        )
    if layout.train.zero not in compatible_zero_stages(name):
        yield (
            f"train.zero = {layout.train.zero} reshards weights that the split backward of schedule.name = {name} "
            f"needs again; legal: {listed([n for n in compatible_zero_stages(name) if n or layout.ranks.fsdp == 1])}"
        )
    if layout.knobs.recompute not in legal_recompute(name):
        yield (
            f"knobs.recompute = {layout.knobs.recompute} would recompute a layer for each of its weights under "
            f"the split backward of schedule.name = {name}; legal: {', '.join(legal_recompute(name))}"
        )
    if not can_compile(layout, name):
        whole = ", ".join(other for other, traits in SCHEDULES.items() if not traits.split_backward)
        yield (
            f"train.compile = true does not work with the split backward of schedule.name = {name}, which "
            f"visits a layer twice; legal: false, or schedule.name = {whole}"
        )
    micro_batches = legal_micro_batches(layout, name)
    if not micro_batches:
        dp, least = layout.ranks.dp, min_micro_batches(name, pp, layout.virtual_stages)
        yield (
            f"train.global_batch = {layout.train.global_batch} gives each of {dp} data ranks {layout.local_batch} "
            f"sequences, too few for {layout.stages} stages; legal: a multiple of {dp * least}"
        )
    elif layout.knobs.micro_batches not in micro_batches:
        yield _micro_batches_refusal(layout, micro_batches)


def _micro_batches_refusal(layout: Layout, legal: list[int]) -> str:
    """The error message for an illegal knobs.micro_batches. The message also names the global batch, because either
    number may be the wrong one."""
    given, batch, dp = layout.knobs.micro_batches, layout.train.global_batch, layout.ranks.dp
    if not accepts_micro_batches(layout.schedule.name, layout.grid.pp, layout.virtual_stages, given):
        return (
            f"knobs.micro_batches = {given} does not suit schedule.name = {layout.schedule.name} over "
            f"{layout.stages} stages; legal: {listed(legal)}"
        )
    ranks = f"each of {dp} data ranks" if dp > 1 else "a step"
    sequences = "1 sequence" if layout.local_batch == 1 else f"{layout.local_batch} sequences"
    return (
        f"knobs.micro_batches = {given} does not divide the {sequences} that train.global_batch = "
        f"{batch} gives {ranks}; legal: {listed(legal)}, or train.global_batch a multiple of {dp * given}"
    )
