"""Applies commands to a simulated run through the knob board that real runs also use; a knob change takes effect in the
simulator."""

import time
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from agents.protocol import Ack, Changes, Command, Event
from agents.rank.errors import sentence
from agents.rank.knob_board import KnobBoard
from agents.rank.many_ranks import ManyRanks
from engine.config.layout import Layout
from engine.control.actions import RunActions
from engine.control.knob_table import Effects, knob_table
from engine.control.placement_effect import Figures, placement_text
from engine.planner.expert_placement import Map, imbalance, local_share, plan_map
from engine.simulate.simulator import Plan, Simulator
from engine.simulate.telemetry.records import LEADER, Records

BYTES_OF_AN_EXPERT_NUMBER = {"adamw": 12, "sgd": 4}  # the fp32 weight and the optimizer state


class Steering:
    """Applies an operator's commands between steps, on all simulated ranks at once."""

    def __init__(self, layout: Layout, simulator: Simulator, ranks: ManyRanks):
        self._layout, self._simulator, self._ranks = layout, simulator, ranks
        self.run_actions = RunActions()
        self._goal: str | None = None
        self.board = self._make_board()

    def _make_board(self) -> KnobBoard:
        simulator, layout = self._simulator, self._layout

        def prepare_plan(schedule: str, micro_batches: int) -> tuple[str, int]:
            return schedule, micro_batches

        def use_plan(plan: tuple[str, int]) -> None:
            simulator.plan = Plan(*plan, simulator.plan.zero)

        def use_zero(zero: int) -> None:
            simulator.plan = replace(simulator.plan, zero=zero)

        def place_experts(goal: str) -> None:
            self._goal = goal

        effects = Effects(
            prepare_plan,
            use_plan,
            use_zero,
            place_experts if layout.grid.ep > 1 and simulator.router else None,
        )
        # The knobs `save` and `profile` are missing: a simulated run has no weights and runs no kernels.
        return knob_table(layout, simulator.values, effects, self.run_actions.knobs())

    def take_command(self, step: int, records: Records, began_s: float) -> bool:
        """Apply or reject the pending command after `step`, or report that it has expired. The command's changes take
        effect at the next step on all ranks, or on none. Returns True if there was a pending command."""
        command = self._ranks.pending
        if command is None:
            return False
        if command.expires_step is not None and step + 1 > command.expires_step:
            self._settle(command, "expired", step, f"step {command.expires_step} has passed")
            return True
        try:
            prepared = self.board.prepare(command.changes)
        except Exception as refusal:  # noqa: BLE001 - whatever a proposal does to a knob, the run goes on
            self._settle(command, "rejected", step, sentence(refusal))
            return True
        before = self.board.in_force(command.changes)
        self.board.commit(command.revision, command.changes, prepared)
        self._ranks.introduce(records.hellos(self.board, step + 1, began_s), records.board(self.board))
        self._settle(command, "applied", step + 1, "", before)
        return True

    def expire_pending(self, step: int) -> None:
        """At the end of the run, report all commands that are still pending as expired."""
        while (command := self._ranks.pending) is not None:
            self._settle(command, "expired", step, "the run has ended")

    def _settle(
        self,
        command: Command,
        state: Literal["applied", "rejected", "expired"],
        step: int,
        why: str,
        before: Changes | None = None,
    ) -> None:
        digest = self.board.digest()
        ranks = range(self._simulator.cluster.world) if state == "applied" else [LEADER]
        self._ranks.settle(
            [Ack(rank, command.revision, state, step, digest, why, before or {}) for rank in ranks]
        )

    # ------------------------------------------------------------------------------------------- experts

    def place_experts(self, load: Any) -> Event | None:
        """If an expert placement has been requested, move experts between the simulated ep ranks according to `load`
        [layer, expert], and return an event with the result; otherwise return None."""
        goal, self._goal = self._goal, None
        router = self._simulator.router
        if goal is None or router is None:
            return None
        ep = self._layout.grid.ep
        total = Figures(0.0)
        maps: dict[int, Map] = {}
        for layer, now in router.placement.items():
            sent = np.tile(load[layer] / ep, (ep, 1))  # each ep rank sends an equal share
            maps[layer] = new = plan_map(goal, now, sent)
            moved = sum(a != b for a, b in zip(now, new, strict=True))
            total = _sum(
                total,
                imbalance(now, sent),
                imbalance(new, sent),
                local_share(now, sent),
                local_share(new, sent),
                moved,
            )
        router.placement = maps
        moe = self._layout.model.moe
        assert moe is not None
        number = BYTES_OF_AN_EXPERT_NUMBER[self._layout.train.optimizer]
        size = 3 * self._simulator.job.model.d_model * moe.d_expert * number * self._layout.grid.dp_replicate
        total = Figures(
            0.0,
            total.layers,
            total.imbalance,
            total.imbalance_after,
            total.at_home,
            total.at_home_after,
            total.experts,
            total.experts * size,
        )
        return Event(time.time(), "info", "engine", placement_text(goal, total))


def _sum(total: Figures, before: float, after: float, home: float, home_after: float, moved: int) -> Figures:
    return Figures(
        0.0,
        total.layers + 1,
        total.imbalance + before,
        total.imbalance_after + after,
        total.at_home + home,
        total.at_home_after + home_after,
        total.experts + moved,
    )
