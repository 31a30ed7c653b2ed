"""The results of a run, step by step, and a simulated operator that proposes the knob changes in the script of a parity
case."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from agents.protocol import Ack, Command, Event, Message, Value
from agents.rank.agent import Agent
from engine.metering.meter import Meter
from tests.ranks.cases.case import Script


@dataclass
class Trace:
    """The results of a run, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    loads: list[Tensor] = field(default_factory=list)  # [layer, expert]
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    # where experts were: layer -> slot -> expert
    maps: list[dict[int, list[int]]] = field(default_factory=list)
    biases: list[dict[str, Tensor]] = field(default_factory=list)  # biases of the routers, after the update
    embeddings: dict[str, Tensor] = field(default_factory=dict)  # the embedding's weight after the last step
    averages: dict[str, Tensor] = field(
        default_factory=dict
    )  # averaged weights after the last step, if there are any
    acks: list[Ack] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    knobs: dict[str, Value] = field(default_factory=dict)


class Operator(Agent):
    """An agent without a hub; on the leader it proposes the knob changes that the test case lists in its script."""

    def __init__(self, script: Script, meter: Meter, trace: Trace):
        super().__init__(None, lambda: meter.operation)
        self._script, self._meter, self._trace = script, meter, trace

    @property
    def pending(self) -> Command | None:
        changes = self._script.get(self._meter.step)
        return Command(self._meter.step, f"at {self._meter.step}", changes) if changes else None

    def settle(self, ack: Ack) -> None:
        self._trace.acks.append(ack)

    def send(self, *messages: Message) -> None:
        self._trace.events += [message.text for message in messages if isinstance(message, Event)]


def router_biases(stage: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in stage.named_buffers() if name.endswith("router.bias")}


def whole(grad: Tensor | None) -> Tensor:
    """A copy of the unsharded tensor on the CPU."""
    assert grad is not None
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).to("cpu", copy=True)


def alike(tensors: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add the tensors of `more` to `tensors`. If both contain a tensor of the same name (a tied embedding), the two
    must be bit-identical."""
    for name in tensors.keys() & more.keys():
        assert torch.equal(tensors[name], more[name]), f"copies of {name} differ"
    tensors |= more


def merged(folder: Path) -> Trace:
    """Merge the traces of all stages into the trace of the whole model."""
    stages = [torch.load(path, weights_only=False) for path in sorted(folder.glob("stage*.pt"))]
    trace: Trace = stages[0]
    for other in stages[1:]:
        assert [ack.digest for ack in other.acks] == [
            ack.digest for ack in trace.acks if ack.state == "applied"
        ], "ranks hold different knobs"
        assert other.losses == trace.losses and other.norms == trace.norms, "ranks disagree on loss or norm"
        for grads, more in zip(trace.grads, other.grads, strict=True):
            alike(grads, more)
        alike(trace.embeddings, other.embeddings)
        alike(trace.averages, other.averages)
        for maps, others in zip(trace.maps, other.maps, strict=True):
            maps |= others
        for biases, more in zip(trace.biases, other.biases, strict=True):
            biases |= more
    return trace
