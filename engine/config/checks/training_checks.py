"""Checks of the optimisation, the learning rate, the training text, the validation text and generated text."""

import math
from collections.abc import Iterator

from engine.config.layout import Layout
from engine.config.learning_rate import decay_steps
from engine.config.refusal import OWN_MODEL
from engine.config.sections.training import Train

MOST_SOURCES = 1024  # limit on the folders of token shards, because each keeps its files open


def train_refusals(layout: Layout) -> Iterator[str]:
    grid, train, source = layout.ranks, layout.train, layout.data.source
    if train.zero == 0 and grid.dp_shard > 1:
        yield (
            f"train.zero = 0 shards nothing, but grid.dp_shard = {grid.dp_shard}; legal: 1, 2, 3, or "
            f"grid.dp_shard = 1 with grid.dp_replicate = {grid.dp} for replicas"
        )
    if train.zero == 0 and grid.cp > 1:
        yield f"train.zero = 0 shards nothing, but grid.cp = {grid.cp} shards like dp_shard; legal: 1, 2, 3"
    if layout.compression.method != "none" and grid.dp_replicate == 1:
        yield (
            f"compression.method = {layout.compression.method} compresses gradients between replicas, but "
            "grid.dp_replicate = 1; legal: none, or grid.dp_replicate at least 2"
        )
    if not (source in ("stdlib", "shards") or source.startswith("text:")):
        yield f"data.source = {source!r} is not legal; legal: stdlib, text:GLOB, shards"


def learning_rate_refusals(train: Train) -> Iterator[str]:
    if train.decay is not None and train.lr_schedule != "wsd":
        yield f"train.decay = {train.decay} requires train.lr_schedule = wsd; legal: wsd, or none"
    if train.lr_schedule == "wsd" and train.warmup + decay_steps(train) > train.steps:
        yield (
            f"train.decay = {decay_steps(train)} after train.warmup = {train.warmup} is longer than train.steps = "
            f"{train.steps}; legal: at most {train.steps} together"
        )


def data_refusals(layout: Layout) -> Iterator[str]:
    data = layout.data
    if data.source == "shards" and not data.shards:
        yield "data.source = shards needs data.shards; legal: a list of folders that engine tokenize wrote"
    if data.source != "shards":
        for key in ("shards", "weights", "epochs"):
            if getattr(data, key) is not None:
                yield f"data.{key} is given, but data.source = {data.source!r}; legal: shards, or no {key}"
    if data.weights is not None and len(data.weights) != len(data.shards or ()):
        yield (
            f"data.weights has {len(data.weights)} numbers for {len(data.shards or ())} folders of data.shards; "
            "legal: one for each folder"
        )
    if data.reset_positions and not data.separate_documents:
        yield (
            "data.reset_positions = true requires data.separate_documents = true, because positions of different "
            "documents would mix; legal: that, or false"
        )
    if len(data.shards or ()) > MOST_SOURCES:
        yield f"data.shards has {len(data.shards or ())} folders; legal: up to {MOST_SOURCES}"


def validation_refusals(layout: Layout) -> Iterator[str]:
    wanted, dp = layout.validation, layout.ranks.dp
    if wanted.every and wanted.source == "shards" and not wanted.shards:
        yield "validation.every needs validation.shards; legal: folders, another validation.source, or every = 0"
    if wanted.source != "shards" and not (wanted.source == "stdlib" or wanted.source.startswith("text:")):
        yield f"validation.source = {wanted.source!r} is not legal; legal: stdlib, text:GLOB, shards"
    if wanted.every and wanted.sequences % dp:
        yield (
            f"validation.sequences = {wanted.sequences} is not a multiple of {dp} data ranks; legal: a multiple of {dp}"
        )


def sample_refusals(layout: Layout) -> Iterator[str]:
    """Refuse the section [sample] of a layout (text generation during training) for a model that cannot generate text.
    The prompt is checked later (`engine.data.prompt`)."""
    wanted, moe = layout.sample, layout.model.moe
    if not wanted.every:
        return
    if layout.model.own:
        yield OWN_MODEL.format(layout.model.implementation, f"sample.every = {wanted.every}")
    if moe is not None and moe.router == "expert_choice":
        yield (
            f"sample.every = {wanted.every} needs a model that generates token by token, but with model.moe.router "
            "= expert_choice an expert chooses among all tokens of a sequence; legal: sample.every = 0, or "
            "token_choice"
        )
    if 0 < wanted.temperature < math.ulp(1.0):
        yield (
            f"sample.temperature = {wanted.temperature} is not legal; legal: 0 (greedy), or above {math.ulp(1.0)}"
        )
