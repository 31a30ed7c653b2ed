"""The knobs of a run: names, legal values, help text. Does not import torch, because simulated runs use the same table.

The functions that carry out changes are passed in as `Effects`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agents.protocol import Legal
from agents.rank.knob_board import Knob, KnobBoard, Values, action
from engine.checkpoint.resume_point import start_value
from engine.config.checks.legal_values import legal_micro_batches, legal_schedules, legal_zero_stages
from engine.config.checks.supported import EVERYTHING, Support
from engine.config.compression import METHODS, RANKS
from engine.config.knob_values import COMPRESSION_KNOBS, KnobValues
from engine.config.layout import Layout
from engine.config.schedule_traits import legal_recompute
from engine.config.sections.bounds import (
    BIAS_RATE,
    CAPACITY_FACTOR,
    GRAD_CLIP,
    LOSS_COEF,
    LR_SCALE,
    RATIO,
    THRESHOLD,
)
from engine.planner.expert_placement import GOALS

CAPACITY = {
    "token_choice": "limit on tokens per expert and sequence, as a multiple of an even share; further "
    "tokens are dropped; none = dropless",
    "expert_choice": "tokens per expert and sequence, as a multiple of an even share; none = 1",
}

BALANCE = {
    "aux": ("aux_loss_coef", LOSS_COEF, "weight of the loss that balances the experts' load"),
    "bias": (
        "bias_rate",
        BIAS_RATE,
        "what each step adds to the router bias of an expert with less than average load",
    ),
}

COMPRESSION = {
    "compression": "how replicas compress the gradients that they sum; what is left out is added to the "
    "next step's gradient",
    "compression_ratio": "share of a gradient's elements that top_k and random_k send",
    "compression_threshold": "threshold sends elements larger than this many times the root mean square",
    "compression_rank": "rank of power_sgd's factors: a higher rank keeps more of a gradient and sends more "
    "bytes",
}


@dataclass(frozen=True)
class Effects:
    """Functions that carry out changes in a run. `prepare_plan(schedule, micro_batches)` builds the object that runs a
    pipeline schedule, and `use_plan` switches the run to it; `use_zero` changes the ZeRO stage. `place_experts` (with
    the goal `load`, `traffic` or `logical`) and `save` carry out the actions `expert_placement` and `save`; if one of
    these functions is None, the board does not offer its action."""

    prepare_plan: Callable[[str, int], Any]
    use_plan: Callable[[Any], None]
    use_zero: Callable[[int], None]
    place_experts: Callable[[str], None] | None = None
    save: Callable[[Any], None] | None = None


def knob_table(
    layout: Layout,
    knob_values: KnobValues,
    effects: Effects,
    actions: Sequence[Knob] = (),
    support: Support = EVERYTHING,
) -> KnobBoard:
    """Make the knob board with the layout's start values. A committed change takes effect in the next step. `actions`
    are actions that the board offers in addition to its own. `support`: the parallel axes, knob values and layout keys
    that the model supports."""

    def schedule(values: Values) -> str:
        return str(values.get("schedule", layout.schedule.name))

    def zero(values: Values) -> int:
        return int(str(values.get("zero", layout.train.zero)))

    def prepare_plan(values: Values) -> Any:
        micro_batches = values["micro_batches"]
        assert isinstance(micro_batches, int)
        return effects.prepare_plan(schedule(values), micro_batches)

    knobs = [
        Knob(
            "micro_batches",
            lambda values: Legal(choices=list(legal_micro_batches(layout, schedule(values)))),
            True,
            "micro-batches per step; more micro-batches make the pipeline bubble smaller but each one less "
            "efficient",
            effects.use_plan,
            prepare_plan,
        ),
        Knob(
            "recompute",
            lambda values: Legal(
                choices=[mode for mode in legal_recompute(schedule(values)) if mode in support.recompute]
            ),
            True,
            "activations recomputed in backward instead of kept: less memory, more computation",
            lambda value: setattr(knob_values, "recompute", value),
            lambda values: values["recompute"],
        ),
        _number(knob_values, "lr_scale", LR_SCALE, "factor on the learning rate"),
        _number(
            knob_values,
            "grad_clip",
            GRAD_CLIP,
            "a gradient with a larger global norm is scaled down to this norm; none = no clipping",
            optional=True,
        ),
    ]
    if layout.model.moe:
        moe = layout.model.moe
        knobs.insert(
            1, _number(knob_values, "capacity_factor", CAPACITY_FACTOR, CAPACITY[moe.router], optional=True)
        )
        knobs += [_number(knob_values, *BALANCE[method]) for method in moe.balances]
        knobs.append(
            _number(knob_values, "z_loss_coef", LOSS_COEF, "weight of the loss on large router logits")
        )
    if layout.ranks.fsdp > 1:  # with one rank, no ZeRO stage shards anything
        knobs.append(
            Knob(
                "zero",
                lambda values: Legal(choices=list(legal_zero_stages(layout, schedule(values)))),
                True,
                "ZeRO: 1 gathers and reduces once a step, 2 reduces each micro-batch, 3 also gathers at each use; "
                "with a pipeline 1 and 2 are equal, and 3 is only for runs that started with it",
                effects.use_zero,
                lambda values: values["zero"],
            )
        )
    if layout.grid.pp > 1:
        knobs.insert(
            1,
            Knob(
                "schedule",
                lambda values: Legal(
                    choices=[*filter(support.schedule, legal_schedules(layout, zero(values)))]
                ),
                True,
                "order of forward and backward passes on the stages, a trade-off between memory and bubble",
                effects.use_plan,
                prepare_plan,
            ),
        )
    if layout.ranks.dp_replicate > 1:
        knobs += _compression(layout, knob_values)
    if effects.place_experts:
        knobs.append(
            Knob(
                "expert_placement",
                lambda _: Legal(choices=list(GOALS)),
                True,
                "move experts: `load` balances the ranks, `traffic` puts experts near their tokens, "
                "`logical` restores the order",
                effects.place_experts,
                lambda values: values["expert_placement"],
                action=True,
            )
        )
    if effects.save:
        knobs.append(
            action("save", "save a checkpoint when the step ends, while training continues", effects.save)
        )
    knobs += actions
    return KnobBoard(knobs, {knob.name: start_value(layout, knob.name) for knob in knobs if not knob.action})


def _compression(layout: Layout, knob_values: KnobValues) -> list[Knob]:
    """The knobs of gradient compression. A change takes effect in the next step. The knobs are not loss-neutral: they
    can affect the loss."""
    ranks = sorted({*RANKS, layout.compression.rank})
    legal = {
        "compression": Legal(choices=list(METHODS)),
        "compression_ratio": Legal(low=RATIO[0], high=RATIO[1]),
        "compression_threshold": Legal(low=THRESHOLD[0], high=THRESHOLD[1]),
        "compression_rank": Legal(choices=list(ranks)),
    }

    def set_key(key: str, value: Any) -> None:
        knob_values.compression = replace(knob_values.compression, **{key: value})

    def knob(name: str, key: str) -> Knob:
        return Knob(
            name,
            lambda _: legal[name],
            False,
            COMPRESSION[name],
            lambda value: set_key(key, value),
            lambda values: values[name],
        )

    return [knob(name, key) for name, key in COMPRESSION_KNOBS.items()]


def _number(
    knob_values: KnobValues, name: str, bounds: tuple[float, float], about: str, optional: bool = False
) -> Knob:
    """A numeric knob that is not loss-neutral. The knob's value is stored in `knob_values`."""
    legal = Legal(low=bounds[0], high=bounds[1], optional=optional)
    return Knob(
        name,
        lambda _: legal,
        False,
        about,
        lambda value: setattr(knob_values, name, value),
        lambda values: values[name],
    )
