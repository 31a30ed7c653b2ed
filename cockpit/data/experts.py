"""Expert load as screens show it: the loads of one step, the worst experts, the capacity, and the ranks that hold an
expert."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agents.alerts.training import DEAD
from agents.protocol import Value
from agents.protocol.held_experts import Held, held_texts, read_held
from cockpit.data import format
from cockpit.data.history.experts import ExpertHistory, Figures, Health, Streak, unwell_experts
from cockpit.data.history.frames import Frame
from cockpit.data.store import Store, Topic

Cell = tuple[int, int]
"""A layer and an expert."""


@dataclass(frozen=True)
class Shown:
    """The expert loads that a screen shows: those of `frame`, which has the index `number` in `history.loads`. `asked`:
    the step that the user selected."""

    history: ExpertHistory
    number: int
    frame: Frame
    asked: int | None = None

    @property
    def newest(self) -> bool:
        return self.number == len(self.history.loads) - 1

    @property
    def exact(self) -> bool:
        """Whether the loads shown are those of a single sampled step; otherwise they are each expert's lowest and
        highest load over several samples."""
        return self.frame.records == 1

    @property
    def layers(self) -> list[int]:
        layers = self.history.loads.layers
        return layers if self.frame.whole else [layer for layer in layers if self.row(layer)[0]]

    def row(self, layer: int) -> tuple[Sequence[float], Sequence[float]]:
        """The lowest and the highest load of each expert of a layer over the samples shown, relative to the mean over
        experts."""
        return self.history.loads.row(self.frame, layer)

    def figures(self, layer: int) -> tuple[Figures, Figures] | None:
        """Statistics of a layer's expert load at the last step shown (or at the last step before it that has them),
        such as the load of its hottest expert. Old steps are merged, so the result is the lowest and the highest value
        of each statistic over the merged steps; the two are equal if the step was not merged. None if there are no
        values."""
        frames = self.history.figures
        at = frames.find(self.frame.last)
        low, high = frames.row(frames[at], layer) if at is not None else ((), ())
        return (Figures(*low), Figures(*high)) if low else None

    def load(self, cell: Cell) -> tuple[float, float] | None:
        """The lowest and the highest load of an expert over the samples shown, relative to the mean over experts."""
        low, high = self.row(cell[0])
        return (low[cell[1]], high[cell[1]]) if 0 <= cell[1] < len(low) else None

    def rank(self, cell: Cell) -> tuple[int, int]:
        """The expert's rank by load within its layer (1: the highest load), and the layer's number of experts."""
        _, high = self.row(cell[0])
        return 1 + sum(load > high[cell[1]] for load in high), len(high)

    def streaks(self) -> Mapping[Cell, Streak]:
        """For each expert that is dead or hot in the newest sample, the consecutive samples in which it has been dead
        or hot. This is the newest sample even if `frame` is an older one."""
        return self.history.streaks()

    def streak(self, cell: Cell) -> Streak | None:
        return self.history.streak(*cell, self.number)

    def step_text(self) -> str:
        """Text that names the step, or the steps, of the expert loads on the screen, and says so if the history does
        not have the step that the user selected."""
        frame = self.frame
        steps = format.grouped(frame.first)
        if not self.exact:
            steps += f"-{format.grouped(frame.last)}, lowest and highest of {frame.records} samples"
        if self.asked is not None and not frame.first <= self.asked <= frame.last:
            return f"step {format.grouped(self.asked)} is not kept; sample of step {steps}"
        return f"step {steps}"


def shown(store: Store, step: int | None) -> Shown | None:
    """The expert loads of `step` or, if that step was not sampled, of the newest sampled step before it; without
    `step`, the newest expert loads. None if the history has no such sample.
    """
    history = store.expert_history
    if not len(history.loads):
        return None
    number = len(history.loads) - 1 if step is None else history.loads.find(step)
    return None if number is None else Shown(history, number, history.loads[number], step)


# ------------------------------------------------------------------------------------------------------ the worst


@dataclass(frozen=True)
class Unwell:
    """An expert that is dead (with almost no tokens) or hot (with far more tokens than the mean expert)."""

    cell: Cell
    health: Health
    load: float
    streak: Streak | None


@dataclass(frozen=True)
class Unwells:
    """Either the dead or the hot experts: how many there are, in how many layers, and the worst of them."""

    count: int
    layers: int
    worst: Unwell


def unwells(store: Store, at: Shown) -> dict[Health, Unwells]:
    """For the dead experts, and for the hot ones: how many there are, in how many layers, and the worst expert. The
    worst dead expert is the one that has been dead for the longest time; the worst hot expert is the one with the
    highest load. A health state that no expert has is omitted."""
    return store.once("unwells", (), lambda: _unwells(at), (at.number, at.frame))


def _unwells(at: Shown) -> dict[Health, Unwells]:
    cells: dict[Health, list[tuple[float, Cell]]] = {Health.DEAD: [], Health.HOT: []}
    streaks = at.streaks()
    for layer in at.layers:
        low, high = at.row(layer)
        for expert in unwell_experts(low, high):
            cell = (layer, expert)
            if low[expert] < DEAD:
                since = streaks.get(cell)
                cells[Health.DEAD].append((since.first if since else math.inf, cell))
            else:
                cells[Health.HOT].append((-high[expert], cell))
    found = {}
    for health, those in cells.items():
        if those:
            worst, cell = min(those)
            load = -worst if health is Health.HOT else at.row(cell[0])[0][cell[1]]
            layers = len({cell[0] for _, cell in those})
            found[health] = Unwells(len(those), layers, Unwell(cell, health, load, at.streak(cell)))
    return found


def unwell(store: Store, at: Shown) -> list[Unwell]:
    """The dead and the hot experts, worst first: dead ones by how long they have been dead, then hot ones by load."""
    return store.once("unwell", (), lambda: _unwell(at), (at.number, at.frame))


def _unwell(at: Shown) -> list[Unwell]:
    found = []
    for layer in at.layers:
        low, high = at.row(layer)
        for expert in unwell_experts(low, high):
            cell, dead = (layer, expert), low[expert] < DEAD
            kind, load = (Health.DEAD, low[expert]) if dead else (Health.HOT, high[expert])
            found.append(Unwell(cell, kind, load, at.streak(cell)))
    return sorted(found, key=_gravity)


def _gravity(one: Unwell) -> tuple[bool, float, Cell]:
    hot = one.health is Health.HOT
    since = one.streak.first if one.streak else math.inf
    return hot, -one.load if hot else since, one.cell


def hottest(at: Shown) -> list[Cell]:
    """A list that contains the expert with the highest load relative to the fair share; empty if no layer has loads."""
    rows = [(max(at.row(layer)[1]), layer) for layer in at.layers]
    most, layer = max(rows, default=(0.0, 0))
    return [(layer, list(at.row(layer)[1]).index(most))] if rows else []


# ------------------------------------------------------------------------------------------------------- capacity

UNKNOWN = "unknown"


def capacity(store: Store, step: int) -> float | str | None:
    """The load, relative to the fair share, above which an expert drops tokens at `step`: the value of the knob
    capacity_factor. None means that no tokens are dropped, and UNKNOWN that the run has no such knob."""
    summaries = store.state.summaries
    at = bisect_left(summaries, step, key=lambda summary: summary.step)
    value: Value = UNKNOWN
    if at < len(summaries) and summaries[at].step == step and "capacity_factor" in summaries[at].knobs:
        value = summaries[at].knobs["capacity_factor"]
    elif store.state.board:
        states = [knob for knob in store.state.board.knobs if knob.name == "capacity_factor"]
        value = states[0].value if states else UNKNOWN
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    return UNKNOWN


# --------------------------------------------------------------------------------------------------------- owners

_NOBODY = "owner unknown: no rank reports which experts it holds"
_ABSENT = "owner unknown: no rank that has joined holds it"


@dataclass(frozen=True)
class Owners:
    """The ranks that hold an expert, in ascending order; `why` gives the reason if there are none."""

    ranks: Sequence[int]
    why: str = ""


def owners(store: Store, cell: Cell) -> Owners:
    """The ranks that hold an expert's weights and run it, as reported by the ranks."""
    groups = store.once("held experts", (Topic.GRID,), lambda: _held(store))
    ranks = [rank for held, those in groups if any(one.has(*cell) for one in held) for rank in those]
    return Owners(sorted(ranks), "" if ranks else _ABSENT if groups else _NOBODY)


def _held(store: Store) -> list[tuple[list[Held], list[int]]]:
    """Groups the ranks that hold the same experts, and returns each group's experts and ranks."""
    by_texts: dict[tuple[str, ...], list[int]] = {}
    for rank, hello in store.state.hellos.items():
        if texts := held_texts(hello.facts):
            by_texts.setdefault(texts, []).append(rank)
    return [(read_held(texts), ranks) for texts, ranks in by_texts.items()]


def since_text(streak: Streak) -> str:
    """The step since which an expert has been dead or hot, as text such as ``since step 48, not yet at step 44``."""
    first = format.grouped(streak.first)
    if streak.before is None:
        return f"since step {first}" if streak.first == 0 else f"since before step {first}"
    before = format.grouped(streak.before)
    if not streak.exact:
        return f"since a step between {before} and {first}"
    return f"since step {first}, not yet at step {before}"
