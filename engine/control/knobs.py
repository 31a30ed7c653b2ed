"""Makes the knob board of a training run: the settings (knobs) that operators can change while it is live, with the
functions that apply a change to the pipeline, the shards or the experts."""

from collections.abc import Callable, Sequence
from typing import Any

from agents.rank.knob_board import Knob, KnobBoard
from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.control.expert_placement import ExpertPlacement
from engine.control.knob_table import Effects, knob_table
from engine.model.interface import implementation_of
from engine.sharding.fsdp import Shards
from engine.sharding.pipeline_schedules import Pipeline, Plan


def make_board(
    layout: Layout,
    pipeline: Pipeline,
    shards: Shards,
    knob_values: KnobValues,
    expert_placement: ExpertPlacement | None = None,
    save: Callable[[Any], None] | None = None,
    actions: Sequence[Knob] = (),
) -> KnobBoard:
    """Make the knob board of one rank. The board has an action `expert_placement` and an action `save` only if the
    argument with the action's name is not None."""

    def use_plan(plan: Plan) -> None:
        pipeline.plan = plan

    def place_experts(goal: str) -> None:
        assert expert_placement is not None
        expert_placement.request = goal

    effects = Effects(
        pipeline.prepare, use_plan, shards.use_zero, place_experts if expert_placement else None, save
    )
    return knob_table(layout, knob_values, effects, actions, implementation_of(layout.model).support)
