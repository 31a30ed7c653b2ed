"""The knobs of a training run, as a table: what each may be, what it does, and how it is put in force."""

from typing import Any

from agents.board import Board, Knob, Values
from agents.wire import Legal
from engine.layout import CAPACITY_FACTOR, LR_SCALE, Layout, legal_micro_batches
from engine.model.dials import Dials
from engine.parallel.pipeline import Pipeline, Plan
from engine.planner.placement import GOALS
from engine.train.placing import Placing


def make_board(layout: Layout, pipeline: Pipeline, dials: Dials, placing: Placing | None = None) -> Board:
    """The board with the layout's start values; commits swap values that the next step reads."""

    def use_plan(plan: Plan) -> None:
        pipeline.plan = plan

    def assign(target: object, name: str) -> Any:
        return lambda value: setattr(target, name, value)

    def prepare_plan(values: Values) -> Plan:
        micro_batches = values["micro_batches"]
        assert isinstance(micro_batches, int)
        return pipeline.prepare(layout.schedule.name, micro_batches)

    knobs = [
        Knob(
            "micro_batches",
            lambda _: Legal(choices=list(legal_micro_batches(layout, layout.schedule.name))),
            True,
            "parts that a step's batch is cut into; more make the pipeline bubble smaller and each part less efficient",
            use_plan,
            prepare_plan,
        ),
        Knob(
            "recompute",
            lambda _: Legal(choices=["none", "selective", "full"]),
            True,
            "activations computed again in backward instead of kept: less memory, more work",
            assign(dials, "recompute"),
            lambda values: values["recompute"],
        ),
        Knob(
            "lr_scale",
            lambda _: Legal(low=LR_SCALE[0], high=LR_SCALE[1]),
            False,
            "factor on the learning rate",
            assign(dials, "lr_scale"),
            lambda values: values["lr_scale"],
        ),
    ]
    if layout.model.moe:
        knobs.insert(
            1,
            Knob(
                "capacity_factor",
                lambda _: Legal(low=CAPACITY_FACTOR[0], high=CAPACITY_FACTOR[1], optional=True),
                False,
                "most an expert takes of a sequence, over an even share; the rest is dropped; none = dropless",
                assign(dials, "capacity_factor"),
                lambda values: values["capacity_factor"],
            ),
        )
    if placing:
        knobs.append(
            Knob(
                "place",
                lambda _: Legal(choices=list(GOALS)),
                True,
                "move experts: load evens out ranks, traffic puts them where their tokens are, logical puts them back",
                assign(placing, "wish"),
                lambda values: values["place"],
                action=True,
            )
        )
    return Board(knobs, {knob.name: getattr(layout.knobs, knob.name) for knob in knobs if not knob.action})
