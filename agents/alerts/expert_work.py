"""Predicts how long a rank's steps should take with the current load of its experts. A rank whose experts get many
tokens is slower, but is not a straggler.
"""

from collections.abc import Mapping, Sequence

from agents.alerts.finding import peer_baseline
from agents.protocol import Experts, Hello
from agents.protocol.held_experts import held_texts, read_held
from agents.state.run_state import RunState


class ExpertWork:
    """Predicts each rank's own time (step time without waiting) from its expert load, for the ranks of one pipeline
    stage.

    `own`: by rank, its step time without the waiting for other ranks. If experts are distributed over the axis ep, the
    expected time of a rank is the lower of two estimates: the baseline of the ranks with the same experts, and `usual`
    multiplied by `load_ratio`.
    """

    def __init__(self, state: RunState, own: Mapping[int, float]):
        self._state = state
        self._same_experts: dict[int, dict[int, float]] = {}
        for rank, time in own.items():
            place = state.hellos[rank].coords.get("ep")
            if place is not None:
                self._same_experts.setdefault(place, {})[rank] = time
        self._baselines: dict[int, float] = {}

    def expected(self, rank: int, usual: float) -> float:
        """How long the rank should take for a step, not counting the time spent waiting for other ranks, with the
        current load of its experts; at least `usual`, the baseline of the rank's peers."""
        hello = self._state.hellos[rank]
        place = hello.coords.get("ep")
        if place is None or len(self._same_experts) < 2:
            return usual
        expected = []
        if len(self._same_experts[place]) > 1:
            if rank not in self._baselines:
                self._baselines |= peer_baseline(self._same_experts[place])
            expected.append(self._baselines[rank])
        if (ratio := load_ratio(self._state.experts, hello)) is not None:
            expected.append(usual * ratio)
        return max(usual, min(expected, default=usual))


def load_ratio(experts: Experts | None, hello: Hello) -> float | None:
    """The load of a rank's experts, divided by the load that they would have if each layer were balanced; None if
    unknown."""
    held = read_held(held_texts(hello.facts)) if experts else []
    mine = average = 0.0
    for layer in experts.layers if experts else []:
        loads: Sequence[int] = [
            load
            for expert, load in enumerate(layer.load)
            if any(one.has(layer.layer, expert) for one in held)
        ]
        mine += sum(loads)
        average += sum(layer.load) * len(loads) / len(layer.load) if loads else 0.0
    return mine / average if average else None
