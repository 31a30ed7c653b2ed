"""The timelines of a step, grouped by pipeline. A pipeline has one rank of each stage. Each combination of coordinates
on the other axes (such as dp and tp) has its own replica of the pipeline."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from agents.protocol import Action, Timeline
from cockpit.data import format
from cockpit.data.metrics import median
from cockpit.data.store import Store, Topic

UNEVEN = 0.1  # excess of busy time over the median of the rows, from which a row is named


def typical_of(times: Iterable[float]) -> float | None:
    """The median of `times` or, if the number of values is even, the lower of the two middle values. So with two
    stages, the slower one is compared with the faster one."""
    known = list(times)
    return statistics.median_low(known) if known else None


@dataclass(frozen=True)
class Lane:
    """The actions of one rank, or of one of its stages, in time order. `rank` is None if the stage has sent no timeline
    for the step."""

    pp: int
    rank: int | None
    actions: tuple[Action, ...] = ()
    stage: int | None = None  # the stage that the lane shows; None: all stages of the rank
    others: tuple[Action, ...] = ()  # actions of the rank's other stages
    window_ms: float = 0.0

    @cached_property
    def busy_ms(self) -> float:
        return sum(action.end_ms - action.start_ms for action in self.actions)

    @property
    def idle(self) -> float | None:
        """The fraction of `window_ms` in which this lane is idle. `window_ms`: the time from the start of the step's
        pipeline to the end of the rank's last action (in a simulated run: of the pipeline's last action)."""
        return max(0.0, 1.0 - self.busy_ms / self.window_ms) if self.window_ms else None

    @cached_property
    def parts(self) -> list[int]:
        """The stages of the lane's actions, in order."""
        return sorted({action.stage for action in self.actions})

    @property
    def label(self) -> str:
        return f"pp{self.pp}" if self.stage is None else f"pp{self.pp} s{self.stage}"

    @cached_property
    def medians(self) -> dict[tuple[str, int], float]:
        """The median duration in ms of each kind of action on each stage."""
        times: dict[tuple[str, int], list[float]] = {}
        for action in self.actions:
            times.setdefault((action.kind, action.stage), []).append(action.end_ms - action.start_ms)
        return {key: median(found) or 0.0 for key, found in times.items()}


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The pipeline of one replica in one step, as a list of lanes: the actions of each rank or stage."""

    step: int
    label: str  # the coordinates that identify the replica, such as ``dp0 tp1``
    lanes: tuple[Lane, ...]

    @cached_property
    def window_ms(self) -> float:
        return max((lane.window_ms for lane in self.lanes), default=0.0)

    @cached_property
    def ends(self) -> dict[tuple[str, int, int], float]:
        """The end time of each action in ms, by kind, stage and micro-batch."""
        return {
            (action.kind, action.stage, action.micro_batch): action.end_ms
            for lane in self.lanes
            for action in lane.actions
        }

    @cached_property
    def last_stage(self) -> int:
        return max((action.stage for lane in self.lanes for action in lane.actions), default=0)

    def by_stage(self) -> "Pipeline":
        """The same pipeline with a lane for each stage instead of one for each rank."""
        lanes = [
            replace(
                lane,
                actions=tuple(action for action in lane.actions if action.stage == stage),
                stage=stage,
                others=tuple(action for action in lane.actions if action.stage != stage),
            )
            for lane in self.lanes
            for stage in lane.parts
        ]
        missing = [lane for lane in self.lanes if not lane.parts]
        return Pipeline(
            self.step, self.label, tuple(sorted(lanes, key=lambda lane: lane.stage or 0) + missing)
        )

    @property
    def several(self) -> bool:
        """Whether a rank runs several stages."""
        return any(len(lane.parts) > 1 for lane in self.lanes)


def stage_count(store: Store) -> int:
    """The number of coordinates on the axis pp, that is, of ranks in one pipeline; 1 in a run without pipeline
    parallelism."""
    return store.once(
        "stage count", (Topic.GRID,), lambda: len({store.stage_of(rank) for rank in store.state.hellos})
    )


def pipelines(store: Store, step: int | None) -> list[Pipeline]:
    """The pipelines whose timelines are kept for a step, in descending order of the time at which their last action
    ends."""
    found = store.timelines.at(step)
    if step is None or not found:
        return []
    also = (step, store.timelines.revision)
    # Two panels may show two different steps at a time.
    return store.once(("pipelines", step % 8), (Topic.GRID,), lambda: _pipelines(store, step, found), also)


def _pipelines(store: Store, step: int, found: Mapping[int, Timeline]) -> list[Pipeline]:
    coords = {rank: hello.coords for rank, hello in store.state.hellos.items()}
    stages = sorted({store.stage_of(rank) for rank in coords})
    groups: dict[tuple[tuple[str, int], ...], dict[int, Timeline]] = {}
    for rank, timeline in found.items():
        groups.setdefault(_replica(coords.get(rank, {})), {})[store.stage_of(rank)] = timeline
    made = [
        Pipeline(
            step,
            format.coords(dict(others)),
            tuple(lane_of(pp, lanes.get(pp)) for pp in stages),
        )
        for others, lanes in groups.items()
    ]
    return sorted(made, key=lambda one: (-one.window_ms, one.label))


def _replica(coords: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """The coordinates that the ranks of a pipeline share. The ep coordinate is left out: in some grids ep is derived
    from other axes, so it may differ within a pipeline."""
    return tuple((axis, at) for axis, at in coords.items() if axis not in ("pp", "ep"))


def replica_of(store: Store, rank: int | None) -> str | None:
    """The label of a rank's pipeline; None if the rank is not known."""
    hello = store.state.hellos.get(rank) if rank is not None else None
    return format.coords(dict(_replica(hello.coords))) if hello else None


def lane_of(pp: int, timeline: Timeline | None) -> Lane:
    """A lane with all actions of a rank's timeline."""
    if timeline is None:
        return Lane(pp, None)
    actions = tuple(sorted(timeline.actions, key=lambda action: (action.start_ms, action.end_ms)))
    return Lane(pp, timeline.rank, actions, window_ms=timeline.window_ms)


def uneven(pipeline: Pipeline) -> list[tuple[Lane, float]]:
    """Lanes whose busy time exceeds the median by more than the fraction `UNEVEN`, each with its `excess`, the largest
    first."""
    lanes = [lane for lane in pipeline.lanes if lane.actions]
    middle = _middle(lanes)
    if not middle or len(lanes) < 2:
        return []
    over = [(lane, lane.busy_ms / middle - 1) for lane in lanes if lane.busy_ms / middle - 1 > UNEVEN]
    return sorted(over, key=lambda pair: -pair[1])


def _middle(lanes: list[Lane]) -> float | None:
    return typical_of(lane.busy_ms for lane in lanes)


def excess(pipeline: Pipeline, lane: Lane) -> float | None:
    """By which fraction a lane's busy time exceeds the median over the lanes of the pipeline: 0.18 is 18 %."""
    middle = _middle([one for one in pipeline.lanes if one.actions])
    return lane.busy_ms / middle - 1 if middle and lane.actions else None


@dataclass(frozen=True)
class At:
    """What a lane contains at a given time: an action, or the gap before `following`."""

    start_ms: float
    end_ms: float
    action: Action | None
    following: Action | None = None


def at(lane: Lane, ms: float) -> At:
    """The action that runs in `lane` at time `ms`, or the idle gap around this time."""
    before = 0.0
    for action in lane.actions:
        if ms < action.start_ms:
            return At(before, action.start_ms, None, action)
        if ms < action.end_ms:
            return At(action.start_ms, action.end_ms, action)
        before = max(before, action.end_ms)
    return At(before, max(before, lane.window_ms), None)


def moment_text(pipeline: Pipeline, lane: Lane, ms: float) -> str:
    """What a lane does at time `ms`, as one line of text."""
    if lane.rank is None:
        return f"{lane.label} · no timeline of this stage was sampled"
    here = at(lane, ms)
    length = here.end_ms - here.start_ms
    times = f"{length:.1f} ms ({here.start_ms:.1f}–{here.end_ms:.1f})"
    if here.action is None:
        return f"{lane.label} · idle {times}{_after_gap(pipeline, here)}"
    action = here.action
    usual = lane.medians.get((action.kind, action.stage))
    name = f"{action.kind}{action.micro_batch} of stage {action.stage}"
    against = ""
    if usual:
        against = (
            f" · {format.excess(length / usual - 1)} against the median {action.kind} here, {usual:.1f} ms"
        )
    return f"{lane.label} · {name} · {times}{against}"


def _after_gap(pipeline: Pipeline, here: At) -> str:
    """Text for what follows a gap: the next action, and when the neighbouring stage finished the action that produces
    its input."""
    following = here.following
    if following is None:
        return " · then the window ends" if here.end_ms > here.start_ms else ""
    name = f"{following.kind}{following.micro_batch}"
    source = {"F": following.stage - 1, "B": following.stage + 1}.get(following.kind)
    ended = pipeline.ends.get((following.kind, source, following.micro_batch)) if source is not None else None
    if ended is None:
        return f" · then {name}"
    return f" · then {name}, whose input {name} of stage {source} ended at {ended:.1f} ms"


def longest(pipeline: Pipeline) -> tuple[Lane, Action, float] | None:
    """The action whose duration exceeds the median for its kind and stage by the most: its lane, the action itself, and
    the excess in ms. None if no action takes more than 1.5 times the median.
    """
    found = [
        (action.end_ms - action.start_ms - lane.medians[action.kind, action.stage], lane, action)
        for lane in pipeline.lanes
        for action in lane.actions
        if action.end_ms - action.start_ms > 1.5 * lane.medians[action.kind, action.stage] > 0
    ]
    if not found:
        return None
    over, lane, action = max(found, key=lambda one: one[0])
    return lane, action, over
