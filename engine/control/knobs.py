"""The knobs of a training run, as a table: what each may be, what it does, and how it is put in force."""

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
    "token_choice": "most an expert takes of a sequence, over an even share; the rest is dropped; none = dropless",
    "expert_choice": "tokens an expert takes of a sequence, over an even share; none = 1",
}


BALANCE = {
    "aux": ("aux_loss_coef", LOSS_COEF, "weight of the loss that evens out the experts' load"),
    "bias": ("bias_rate", BIAS_RATE, "what a step adds to the bias of an expert that too few chose"),
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
    """The board with the layout's start values; commits swap values that the next step reads.

    `expert_placement` and `save` carry out the actions of these names; without them the board does not offer these
    actions. `actions` are further actions.
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
            "parts that a step's batch is cut into; more make the pipeline bubble smaller and each part less efficient",
            use_plan,
            prepare_plan,
        ),
        Knob(
            "recompute",
            lambda values: Legal(choices=list(legal_recompute(schedule(values)))),
            True,
            "activations computed again in backward instead of kept: less memory, more work",
            lambda value: setattr(knob_values, "recompute", value),
            lambda values: values["recompute"],
        ),
        _dial(knob_values, "lr_scale", LR_SCALE, "factor on the learning rate"),
        _dial(
            knob_values,
            "grad_clip",
            GRAD_CLIP,
            "the gradient is scaled down to this global norm where it is larger; none = left as it is",
            optional=True,
        ),
    ]
    if layout.model.moe:
        moe = layout.model.moe
        knobs.insert(
            1, _dial(knob_values, "capacity_factor", CAPACITY_FACTOR, CAPACITY[moe.router], optional=True)
        )
        knobs += [_dial(knob_values, *BALANCE[means]) for means in moe.balances]
        knobs.append(
            _dial(knob_values, "z_loss_coef", LOSS_COEF, "weight of the loss on large router logits")
        )
    if layout.ranks.fsdp > 1:  # or nothing is sharded
        knobs.append(
            Knob(
                "zero",
                lambda values: Legal(choices=list(legal_zero_stages(layout, schedule(values)))),
                True,
                "ZeRO: 1 gathers and reduces once a step, 2 reduces each micro-batch, 3 also gathers at each use; with "
                "a pipeline 1 and 2 are alike, and 3 is for runs that began with it",
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
                "order in which stages run forwards and backwards: memory against bubble",
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
                "move experts: load evens out ranks, traffic puts them where their tokens are, logical puts them back",
                lambda value: setattr(expert_placement, "request", value),
                lambda values: values["expert_placement"],
                action=True,
            )
        )
    if save:
        knobs.append(
            action("save", "a checkpoint of the run when the step ends, written while it trains on", save)
        )
    knobs += actions
    return KnobBoard(knobs, {knob.name: start_value(layout, knob.name) for knob in knobs if not knob.action})


def _dial(
    knob_values: KnobValues, name: str, bounds: tuple[float, float], about: str, optional: bool = False
) -> Knob:
    """A number that the next step reads, and that changes the loss."""
    legal = Legal(low=bounds[0], high=bounds[1], optional=optional)
    return Knob(
        name,
        lambda _: legal,
        False,
        about,
        lambda value: setattr(knob_values, name, value),
        lambda values: values[name],
    )
