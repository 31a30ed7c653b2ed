"""Settings for generating text from a checkpoint: a layout with one rank or a tp x pp x ep grid, and how tokens are
chosen. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from engine.config.checks.trainable import untrained
from engine.config.layout import Layout
from engine.config.refusal import OWN_MODEL, LayoutError, shown
from engine.config.sections.knobs import Knobs
from engine.config.sections.parallelism import Schedule
from engine.config.sections.run import Run
from engine.config.sections.training import Train
from engine.config.toml import from_toml, to_toml

LEGAL = ("grid.tp", "grid.pp", "grid.ep", "grid.ep_method", "grid.ep_inner", "train.precision")
# Sampling needs no auxiliary loss, for which the ranks would have to exchange counts.
WITHOUT_AUX = {
    "aux": "none",
    "aux+bias": "bias",
}


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen. With `temperature` 0, decoding is greedy. The temperature is applied first, then `top_k`,
    then `top_p`; if one of the last two is None, it excludes no tokens."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


def sampling_layout(saved: Layout, overrides: Sequence[str]) -> Layout:
    """The layout for generation with the model of `saved`, on one rank unless `overrides` say otherwise. Raises
    LayoutError."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in LEGAL:
            raise LayoutError(f"{shown(key)} cannot be set for sampling; legal: {', '.join(LEGAL)}")
    model = saved.model
    if model.own:
        raise LayoutError(OWN_MODEL.format(model.implementation, "engine sample"))
    if model.moe is not None:
        if model.moe.router == "expert_choice":
            raise LayoutError(
                "model.moe.router = expert_choice: an expert chooses among all tokens of a sequence, "
                "including later ones, so the model cannot generate token by token; legal for engine "
                "sample: token_choice"
            )
        balance = WITHOUT_AUX.get(model.moe.balance, model.moe.balance)
        model = structs.replace(model, moe=structs.replace(model.moe, balance=balance))
    base = Layout(
        model=model,
        run=Run(name=saved.run.name, seed=saved.run.seed),
        train=Train(steps=1, global_batch=1, zero=0, precision=saved.train.precision),
        schedule=Schedule(name="gpipe"),  # one stage per rank; no minimum of micro-batches
        knobs=Knobs(aux_loss_coef=0.0),
    )
    layout = from_toml(to_toml(base), list(overrides), "the checkpoint's layout")
    if refusal := untrained(layout):
        raise LayoutError(refusal)
    return layout
