"""Defines the knobs of a training run: legal values, help text, and how a new value is applied."""

from collections.abc import Callable, Sequence
from typing import Any

from agents.protocol import Legal
from agents.rank.knob_board import Knob, KnobBoard, Values
from engine.checkpoint.resume import start_value
from engine.config.knob_values import KnobValues
from engine.config.layout import BIAS_RATE, CAPACITY_FACTOR, GRAD_CLIP, LOSS_COEF, LR_SCALE, Layout
from engine.config.legal_values import legal_micro_batches, legal_schedules, legal_zero_stages
from engine.config.schedule_traits import legal_recompute
from engine.control.actions import action
from engine.control.expert_placement import ExpertPlacement
from engine.planner.expert_placement import GOALS
from engine.sharding.fsdp import Shards
from engine.sharding.pipeline import Pipeline, Plan

CAPACITY = {
    "token_choice": "maximum tokens of a sequence per expert, as a multiple of an even share; none = dropless",
    "expert_choice": "tokens of a sequence per expert, as a multiple of an even share; none = 1",
}

BALANCE = {
    "aux": ("aux_loss_coef", LOSS_COEF, "weight of the loss that balances the experts' load"),
    "bias": (
        "bias_rate",
        BIAS_RATE,
        "added each step to the router bias of an expert below the average load",
    ),
}


def make_board(
    layout: Layout,
    pipeline: Pipeline,
    shards: Shards,
    knob_values: KnobValues,
    expert_placement: ExpertPlacement | None = None,
    save: Callable[[Any], None] | None = None,
    actions: Sequence[Knob] = (),
) -> KnobBoard:
    """The knob board with the layout's start values. Committing a change sets values that the next step reads.

    `expert_placement` and `save` carry out the actions of the same names; if one is None, the board lacks that action.
    `actions` are further actions.
    """

    def use_plan(plan: Plan) -> None:
        pipeline.plan = plan

    def schedule(values: Values) -> str:
        return str(values.get("schedule", layout.schedule.name))

    def zero(values: Values) -> int:
        return int(str(values.get("zero", layout.train.zero)))

    def prepare_plan(values: Values) -> Plan:
        micro_batches = values["micro_batches"]
        assert isinstance(micro_batches, int)
        return pipeline.prepare(schedule(values), micro_batches)

    knobs = [
        Knob(
            "micro_batches",
            lambda values: Legal(choices=list(legal_micro_batches(layout, schedule(values)))),
            True,
            "micro-batches per step; more micro-batches make the pipeline bubble smaller but each one less efficient",
            use_plan,
            prepare_plan,
        ),
        Knob(
            "recompute",
            lambda values: Legal(choices=list(legal_recompute(schedule(values)))),
            True,
            "activations that backward recomputes instead of keeping them: less memory, more computation",
            lambda value: setattr(knob_values, "recompute", value),
            lambda values: values["recompute"],
        ),
        _number(knob_values, "lr_scale", LR_SCALE, "factor on the learning rate"),
        _number(
            knob_values,
            "grad_clip",
            GRAD_CLIP,
            "maximum of the global gradient norm (clipping); none = no clipping",
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
    if layout.ranks.fsdp > 1:  # otherwise nothing is sharded
        knobs.append(
            Knob(
                "zero",
                lambda values: Legal(choices=list(legal_zero_stages(layout, schedule(values)))),
                True,
                "ZeRO: 1 gathers and reduces once a step, 2 reduces each micro-batch, 3 also gathers at each use; "
                "with a pipeline 1 and 2 are equal, and 3 is only for runs that started with it",
                shards.use_zero,
                lambda values: values["zero"],
            )
        )
    if layout.grid.pp > 1:
        knobs.insert(
            1,
            Knob(
                "schedule",
                lambda values: Legal(choices=list(legal_schedules(layout, zero(values)))),
                True,
                "order of forward and backward passes on the stages: memory against bubble",
                use_plan,
                prepare_plan,
            ),
        )
    if expert_placement:
        knobs.append(
            Knob(
                "expert_placement",
                lambda _: Legal(choices=list(GOALS)),
                True,
                "move experts: load balances ranks, traffic puts experts near their tokens, logical restores the order",
                lambda value: setattr(expert_placement, "request", value),
                lambda values: values["expert_placement"],
                action=True,
            )
        )
    if save:
        knobs.append(
            action("save", "save a checkpoint when the step ends, in the background of training", save)
        )
    knobs += actions
    return KnobBoard(knobs, {knob.name: start_value(layout, knob.name) for knob in knobs if not knob.action})


def _number(
    knob_values: KnobValues, name: str, bounds: tuple[float, float], about: str, optional: bool = False
) -> Knob:
    """A knob that sets a number in `knob_values` and affects the loss."""
    legal = Legal(low=bounds[0], high=bounds[1], optional=optional)
    return Knob(
        name,
        lambda _: legal,
        False,
        about,
        lambda value: setattr(knob_values, name, value),
        lambda values: values[name],
    )
