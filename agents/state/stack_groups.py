"""Groups ranks by the code location of their training thread, and names the ranks whose location differs.

The hub and the cockpit both use this module, so that the run's log and `cockpit stacks` agree.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agents.protocol import CodeFrame, RankStacks, StacksCollected, clean

# Words in the name of a function that waits for other ranks.
WAITS = (
    *(
        "reduce",
        "gather",
        "scatter",
        "broadcast",
        "barrier",
        "all_to_all",
        "alltoall",
        "wait",
        "recv",
        "receive",
    ),
    *("agree", "exchange", "synchronize", "rendezvous"),
)
PLACES_NAMED = 3  # maximum number of places of odd ranks in the sentence
RANKS_NAMED = 8  # maximum number of ranks listed for one place


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose training threads are at the same place in the code. `shown`: the stacks of the group's
    lowest-numbered rank. `place`: a function and the line of the program's own code that calls it, such as ``all_reduce
    (train.py:41)``. No two groups have the same `place`."""

    ranks: tuple[int, ...]
    shown: RankStacks
    place: str

    @property
    def waits(self) -> bool:
        """Whether the group waits for other ranks, judged by the name of the innermost function."""
        frames = _frames(self.shown)
        return bool(frames) and any(word in frames[-1].function.lower() for word in WAITS)


@dataclass(frozen=True)
class Explanation:
    """Why a run has stalled, derived from the stack traces of its ranks. The `odd` ranks are at a different place in
    the code from the other ranks, or did not send their stacks.
    """

    sentence: str
    groups: tuple[StackGroup, ...]  # the largest first
    odd: tuple[int, ...]


def explanation(answers: Sequence[RankStacks], end: StacksCollected) -> Explanation:
    """Group the ranks by the stacks that they sent in answer to one query, and describe in one sentence where in the
    code they are, and which of them are `odd` (at a different place from the others, or silent)."""
    groups = grouped(answers)
    silent = [one.rank for one in end.unanswered]
    odd = _odd(groups)
    elsewhere = [rank for group in odd for rank in group.ranks]
    parts = _parts(groups, odd, end)
    for why, ranks in _silences(end).items():
        parts.append(f"{ranks_text(ranks)} did not answer: {why}")
    if end.more_unanswered:
        parts.append(f"{end.more_unanswered} more rank{'s' * (end.more_unanswered != 1)} did not answer")
    if end.not_asked:
        parts.append(f"not asked: {end.not_asked} more rank{'s' * (end.not_asked != 1)}")
    return Explanation("; ".join(parts), tuple(groups), tuple(sorted({*elsewhere, *silent})))


def grouped(answers: Iterable[RankStacks]) -> list[StackGroup]:
    """Group ranks by the stack of their training thread, largest group first. Groups of equal size are ordered by
    whether they wait for other ranks (waiting groups first), then by step (later steps first)."""
    found: defaultdict[object, list[RankStacks]] = defaultdict(list)
    for one in sorted(answers, key=lambda one: one.rank):
        found[_place_of(one)].append(one)
    stacks = [_frames(those[0]) for those in found.values()]
    groups = [
        StackGroup(tuple(one.rank for one in those), those[0], _place(frames, stacks))
        for those, frames in zip(found.values(), stacks, strict=True)
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), not group.waits, -group.shown.step))


def ranks_text(ranks: Sequence[int]) -> str:
    """Sorted ranks as text with ranges, such as ``rank 3`` or ``ranks 0-2, 5``; a long list is shortened."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    left = sum(high - low + 1 for low, high in spans[RANKS_NAMED:])
    more = f" and {left} more" if left else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words[:RANKS_NAMED])}{more}"


def _parts(groups: list[StackGroup], odd: list[StackGroup], end: StacksCollected) -> list[str]:
    if not groups:
        return ["no rank sent its stack"]
    first = groups[0]
    if len(groups) == 1 and len(first.ranks) == end.world and end.world > 1:
        return [f"all {end.world} ranks {_are(first, plural=True)}: no rank is elsewhere"]
    if len(groups) > 1 and not odd:
        parts = [f"the ranks are at {len(groups)} places, none of which has more ranks than the others"]
        return [*parts, *(_group_text(group) for group in groups[:PLACES_NAMED]), *_rest(groups)]
    asked = end.answered + len(end.unanswered) + end.more_unanswered + end.not_asked
    of = f"{asked} ranks" if asked == end.world else f"{asked} ranks asked"
    others = [group for group in groups if group not in odd]
    if len(others) == 1:
        text = f"{len(others[0].ranks)} of {of} {_are(others[0], plural=True)}"
    else:
        verb = "wait" if all(group.waits for group in others) else "are"
        text = f"{_count(others)} of {of} {verb} at {len(others)} places, most of them in {others[0].place}"
    return [text, *(_group_text(group) for group in odd[:PLACES_NAMED]), *_rest(odd)]


def _rest(groups: list[StackGroup]) -> list[str]:
    more = groups[PLACES_NAMED:]
    return [f"{_count(more)} ranks at {len(more)} more places"] if more else []


def _group_text(group: StackGroup) -> str:
    return f"{ranks_text(group.ranks)} {_are(group, plural=len(group.ranks) > 1)}"


def _are(group: StackGroup, plural: bool) -> str:
    if group.waits:
        return f"{'wait' if plural else 'waits'} in {group.place}"
    return f"{'are' if plural else 'is'} in {group.place}"


def _odd(groups: list[StackGroup]) -> list[StackGroup]:
    """The groups that the other ranks wait for: the groups that are not waiting, if they contain at most half of the
    ranks; otherwise the groups at the earliest step, if they contain less than half of the ranks; otherwise all groups
    except the largest, or none if no single group is the largest."""
    busy = [group for group in groups if not group.waits]
    if busy and 2 * _count(busy) <= _count(groups) and len(busy) < len(groups):
        return busy
    earliest = min((group.shown.step for group in groups), default=0)
    behind = [group for group in groups if group.shown.step == earliest]
    if 2 * _count(behind) < _count(groups):
        return behind
    majority = len(groups) > 1 and len(groups[0].ranks) > len(groups[1].ranks)
    return groups[1:] if majority else []


def _count(groups: Iterable[StackGroup]) -> int:
    return sum(len(group.ranks) for group in groups)


def _silences(end: StacksCollected) -> dict[str, list[int]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for one in end.unanswered:
        found[clean(one.why)].append(one.rank)
    return found


def _frames(stacks: RankStacks) -> list[CodeFrame]:
    return stacks.threads[0].frames if stacks.threads else []


def _place(frames: list[CodeFrame], stacks: list[list[CodeFrame]]) -> str:
    """Text such as `wait (train.py:120)`: the innermost function, and the innermost line of the program's own code. If
    this line is the same in another stack, the text instead names the outermost line at which the two stacks differ,
    and the function that is called at that differing line. If this function belongs to an installed package, the text
    still names the innermost function.
    """
    if not frames:
        return "no Python code"
    at = _innermost(frames)
    other = next((one for one in stacks if one is not frames and one and _same_end(one, frames)), None)
    function = frames[-1]
    if other is not None:
        pairs = zip(frames, other, strict=False)
        at = next((i for i, (one, two) in enumerate(pairs) if _key(one) != _key(two)), at)
        inner = frames[at + 1] if at + 1 < len(frames) else frames[at]
        function = frames[-1] if inner.installed else inner
    return f"{clean(function.function)} ({clean(frames[at].file.rsplit('/', 1)[-1])}:{frames[at].line})"


def _innermost(frames: list[CodeFrame]) -> int:
    """The index of the innermost frame of the program's own code; without such a frame, the index of the last frame."""
    return next((i for i in range(len(frames) - 1, -1, -1) if not frames[i].installed), len(frames) - 1)


def _same_end(one: list[CodeFrame], two: list[CodeFrame]) -> bool:
    return _key(one[_innermost(one)]) == _key(two[_innermost(two)])


def _key(frame: CodeFrame) -> tuple[str, int]:
    return frame.file, frame.line


def _place_of(stacks: RankStacks) -> object:
    """A key that is equal for ranks whose stacks are at the same place in the code. It contains the line numbers of the
    frames in the program's own code. For a frame in an installed package, it contains only the file and the function.

    A function of a package may wait in a loop, so its current line varies. Its line number is included only if the
    stack has no frame in the program's own code.
    """
    frames = _frames(stacks)
    own = any(not one.installed for one in frames)
    return tuple((one.file, one.function, 0 if own and one.installed else one.line) for one in frames)
