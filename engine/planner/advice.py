"""Finds the bottleneck of a run, with evidence, and ranks knob changes by their predicted gain.

This module has no side effects. The caller passes the measurements of the run, previews of legal changes, and changes
that a trial in this run has shown to bring no gain. The bottleneck is the cause that takes the largest share of a step,
or memory if it is nearly full.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agents.protocol import Changes, spell

HOT = 2.0  # minimum load of the busiest expert, relative to the mean, that is named as a cause
FULL = 0.95  # minimum share of a device's memory in use at which memory is the bottleneck
SHARED_CORES = (
    "ranks share cores: their times are not those of a cluster, so changes cannot be ranked by time; "
    "cockpit try measures one"
)
EXCHANGES = {
    "tp": "tensor-parallel exchanges",
    "cp": "context-parallel exchanges",
    "ep": "expert all-to-alls",
    "dp": "gradient reductions and weight gathers",
}


@dataclass(frozen=True)
class Evidence:
    """Measurements of a run, averaged over ranks. Times are in ms per step. `bubble`: the share of the time from a
    pipeline's start to the end of its last action in which a rank is idle. None: not known. `exposed_ms`: by axis, the
    time in collectives that does not overlap with computation."""

    step_ms: float
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    exposed_ms: Mapping[str, float] = field(default_factory=dict)
    bubble: float | None = None
    bubble_bound: float | None = None
    load_max_over_mean: float | None = None
    memory_share: float | None = None  # share of the memory in use on the fullest device
    micro_batches: int | None = None


@dataclass(frozen=True)
class Bottleneck:
    """What limits the speed of a run the most: the largest component of the step time (such as computation, exposed
    communication on one axis, or the bubble), or memory that is nearly full. `share`: the share of the step time that
    `cause` takes or, if the cause is memory, the share of memory in use. `sentence`: the evidence."""

    cause: str
    share: float
    sentence: str


@dataclass(frozen=True)
class Candidate:
    """A legal change and its preview: the step time in ms before the change, and the interval of the step time after
    it. None: not known."""

    changes: Changes
    now_ms: float | None
    after_ms: tuple[float, float] | None
    likely_ms: float | None = None
    source: str = ""
    does_not_fit: str = ""  # the reason, if the change does not fit into memory

    @property
    def words(self) -> str:
        return ", ".join(f"{name}={spell(value)}" for name, value in self.changes.items())


@dataclass(frozen=True)
class Ranked:
    """A change with its predicted gain: the minimum, likely and maximum share of the step time that the change
    saves."""

    candidate: Candidate
    least: float
    likely: float
    most: float

    @property
    def undecided(self) -> bool:
        """Whether the change may also make steps slower or have no effect."""
        return self.least <= 0


@dataclass(frozen=True)
class Advice:
    """`ranked`: the changes that are likely to make steps faster, best first; changes that may also bring no gain come
    last. `left_out`: one sentence for each change that does not fit into memory or that this run has already tried
    without getting faster steps; `unknown`: changes without a predicted time."""

    bottleneck: Bottleneck | None
    ranked: list[Ranked]
    left_out: list[str]
    unknown: list[Candidate]
    why_not: str = ""  # the reason, if no change is ranked

    @property
    def candidates(self) -> list[Ranked]:
        """The ranked changes that may turn out to be the best: the first one, and each one whose maximum gain exceeds
        the minimum gain of the first."""
        return [one for one in self.ranked if one is self.ranked[0] or one.most > self.ranked[0].least]


def bottleneck(evidence: Evidence) -> Bottleneck:
    """The bottleneck: memory if it is nearly full, else the cause that takes the largest share of a step."""
    step = evidence.step_ms
    exposed = {axis: ms for axis, ms in evidence.exposed_ms.items() if axis in EXCHANGES}
    found = [
        Bottleneck(
            axis,
            ms / step,
            f"{EXCHANGES[axis]} take {100 * (ms / step):.0f} % of a step, {ms:,.0f} of {step:,.0f} ms",
        )
        for axis, ms in exposed.items()
        if ms > 0
    ]
    if evidence.bubble is not None:
        found.append(Bottleneck("bubble", evidence.bubble, _bubble_sentence(evidence)))
    hidden = sum(exposed.values()) / step
    computing = {phase: ms / step for phase, ms in evidence.phases_ms.items()}
    work = min(1.0, sum(computing.get(phase, 0.0) for phase in ("forward", "backward")))
    if work:
        own = max(0.0, work - hidden)
        sentence = f"computation takes {100 * own:.0f} % of a step"
        if (load := evidence.load_max_over_mean) is not None and load >= HOT:
            sentence += f", and the busiest expert has {load:.1f} times the mean load"
        found.append(Bottleneck("compute", own, sentence))
    found += [
        Bottleneck(phase, share, f"{phase} takes {100 * share:.0f} % of a step")
        for phase, share in computing.items()
        if phase not in ("forward", "backward", "agree")
    ]
    worst = max(
        found, key=lambda one: one.share, default=Bottleneck("unknown", 0.0, "no phase is measured yet")
    )
    if (memory := evidence.memory_share) is not None and memory >= FULL:
        return Bottleneck("memory", memory, f"memory is {100 * memory:.0f} % full; {worst.sentence}")
    return worst


def _bubble_sentence(evidence: Evidence) -> str:
    assert evidence.bubble is not None
    text = f"the pipeline idles {100 * evidence.bubble:.0f} % of the time"
    if evidence.bubble_bound is not None:
        text += f", of which the schedule explains {100 * min(evidence.bubble_bound, evidence.bubble):.0f} %"
    if evidence.micro_batches:
        text += f", with {evidence.micro_batches} micro-batches"
    return text


def advise(
    evidence: Evidence, candidates: Iterable[Candidate], refuted: Sequence[tuple[Changes, str]] = ()
) -> Advice:
    """Rank the candidates that are likely to make steps faster: first those whose minimum gain is above 0, sorted by
    that gain, then the others, sorted by their likely gain. `refuted`: changes that brought no gain when this run tried
    them, with the measured outcome."""
    ranked, left_out, unknown = [], [], []
    for one in candidates:
        measured = next((text for changes, text in refuted if changes == one.changes), None)
        if measured is not None:
            left_out.append(f"{one.words} is left out: a trial of this run was not faster ({measured})")
        elif one.does_not_fit:
            left_out.append(f"{one.words} is left out: it {one.does_not_fit}")
        elif one.now_ms is None or one.after_ms is None or one.now_ms <= 0:
            unknown.append(one)
        else:
            low, high = one.after_ms
            likely = one.likely_ms if one.likely_ms is not None else (low + high) / 2
            least, middle, most = (1 - after / one.now_ms for after in (high, likely, low))
            if middle > 0:
                ranked.append(Ranked(one, least, middle, most))
    ranked.sort(key=lambda one: (one.undecided, -one.likely if one.undecided else -one.least))
    return Advice(bottleneck(evidence), ranked, left_out, unknown)
