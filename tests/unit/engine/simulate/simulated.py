"""Small simulated runs for tests, and the messages that a hub receives from them."""

from collections.abc import Iterator

from agents.protocol import AnyMessage, codec
from agents.rank.many_ranks import ManyRanks
from engine.config.layout import Layout
from engine.config.toml import from_toml
from engine.planner.hardware.description import Hardware
from engine.planner.hardware.table import hardware
from engine.simulate.scenario import Scenario, scenario_from_toml
from engine.simulate.simulator import Simulated, Simulator
from engine.simulate.steering import Steering
from engine.simulate.telemetry.packing import frames
from engine.simulate.telemetry.records import Records
from engine.telemetry.expert_load import experts_message, loads_message

LAYOUT = """
[run]
name = "small"
[model]
layers = 8
d_model = 1024
heads = 16
seq_len = 1024
vocab = 32768
[model.moe]
experts = 16
top_k = 2
d_expert = 2048
balance = "aux+bias"
[grid]
pp = 2
dp_shard = 4
tp = 4
ep = 8
[train]
steps = 400
global_batch = 64
precision = "bf16"
grad_clip = 1.0
[knobs]
micro_batches = 8
"""


def small(*overrides: str) -> Layout:
    """A layout of 32 ranks on 4 nodes. `overrides` have the form of the command line, `section.key=value`."""
    return from_toml(LAYOUT, list(overrides))


def machine() -> Hardware:
    return hardware("H100")


class Run:
    """A simulated run with methods to run steps and to change knobs."""

    def __init__(self, layout: Layout | None = None, scenario: str | Scenario = "", seed: int = 1):
        self.layout = layout or small()
        events = scenario if isinstance(scenario, Scenario) else scenario_from_toml(scenario)
        self.simulator = Simulator(self.layout, machine(), events, seed)
        self.steering = Steering(self.layout, self.simulator, ManyRanks("small", None))
        self.records = Records(self.simulator, 1.0)
        self.number = 0

    def change(self, **changes: str | float | bool | None) -> None:
        """Change knobs before the next step."""
        board, changed = self.steering.board, dict(changes)
        board.commit(board.revision + 1, changed, board.prepare(changed))

    def step(self) -> Simulated:
        board = self.steering.board
        found = self.simulator.step(self.number, board.revision, board.values, 0.0)
        if found.routed:
            self.steering.place_experts(found.routed.load)
        self.number += 1
        return found

    def steps(self, count: int) -> list[Simulated]:
        return [self.step() for _ in range(count)]

    def introductions(self) -> Iterator[AnyMessage]:
        yield from self.records.hellos(self.steering.board, 0, 1.0)
        yield self.records.board(self.steering.board)

    def messages(self, found: Simulated) -> Iterator[AnyMessage]:
        """The messages that all ranks send about a step, encoded and decoded again."""
        for rows in (
            self.records.steps(found, found.summary.revision),
            *self.records.vitals(found, found.conditions.silent),
        ):
            for frame in frames(rows):
                yield from codec.decode(frame)
        yield found.summary
        if found.routed:
            yield loads_message(found.step, found.routed.load, found.routed.dropped)
            yield experts_message(found.step, found.routed.load, found.routed.dropped)
