"""The messages that introduce a rank to a hub: its identity and facts of the run and, from the leader, the values of
all knobs (the knob board)."""

import os
from collections.abc import Mapping

import torch

from agents.protocol import VERSION, Facts, Hello, Value
from agents.protocol import Board as BoardMessage
from agents.protocol.held_experts import held_facts
from agents.rank.knob_board import KnobBoard
from agents.rank.sampling import CAPABILITIES
from agents.rundir.local_machine import process_start, this_host, this_machine
from engine.config.layout import Layout
from engine.control.vote import LEADER
from engine.device import device_name
from engine.model.dry_run import parameters_of
from engine.parallel.mesh import World
from engine.planner.expert_placement import Map, experts_of
from engine.rendezvous import usable_cores
from engine.telemetry.layout_facts import layout_facts


def hello(
    layout: Layout,
    world: World,
    board: KnobBoard,
    oversubscribed: bool,
    step: int,
    began_s: float,
    started: Facts,
    placement: Mapping[int, Map],
    restarts: int = 0,
    earlier_s: float = 0.0,
) -> Hello:
    """This rank's identity, coordinates, capabilities and experts, as of `step`. `started`: how the run was started;
    only the leader sends this, because it is the same for all ranks. `placement`: for each MoE layer of this rank, all
    experts in the order in which the ep ranks hold them."""
    ep, of = world.grid.ep, world.coords["ep"]
    held = held_facts({layer: experts_of(logical, ep, of) for layer, logical in placement.items()})
    return Hello(
        version=VERSION,
        run=layout.run.name,
        rank=world.rank,
        world=world.grid.world,
        coords=world.grid.shown(world.rank),
        host=this_host(),
        pid=os.getpid(),
        device=device_name(world.device),
        layout=layout.digest(),
        revision=board.revision,
        step=step,
        leader=world.rank == LEADER,
        facts=facts(layout, oversubscribed) | (started if world.rank == LEADER else {}) | held,
        capabilities=list(CAPABILITIES),
        began_s=began_s,
        restarts=restarts,
        machine=this_machine(),
        process_start=process_start(os.getpid()),
        earlier_s=earlier_s,
    )


def facts(layout: Layout, oversubscribed: bool) -> dict[str, Value]:
    """Constant facts of the run, which screens show next to the measurements."""
    own = {"params": sum(parameters_of(layout.model).values())} if layout.model.own else {}
    return (
        layout_facts(layout)
        | own
        | {
            "cores": usable_cores(),
            "oversubscribed": oversubscribed,
            "torch": str(torch.__version__),
        }
    )


def knob_board(board: KnobBoard) -> BoardMessage:
    """The state of all knobs, as the leader reports it."""
    return BoardMessage(LEADER, board.revision, board.digest(), board.states())
