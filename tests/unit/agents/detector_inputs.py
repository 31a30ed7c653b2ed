"""The state of a run of eight ranks, for tests of the detectors that raise alerts."""

from collections.abc import Iterable

from msgspec import structs

from agents.protocol import Update
from agents.state.run_state import RunState
from tests.unit.agents.fleet import make_hello, make_summary

WORLD = 8


def run_of(world: int = WORLD, step_ms: float = 100.0) -> RunState:
    state = RunState()
    for rank in range(world):
        coords = {"pp": rank // (world // 2), "dp": rank % (world // 2)}
        state.apply(make_hello(rank, world, coords=coords))
    state.apply(structs.replace(make_summary(0), step_ms=step_ms))
    return state


def feed(state: RunState, updates: Iterable[Update]) -> None:
    for update in updates:
        state.apply(update)
