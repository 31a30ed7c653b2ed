"""Evaluates a filter on the cockpit's data about a run (a `Store`). The result is two sets of ranks: ranks that match,
and ranks that do not match.

If the result for a rank is unknown because a value is missing, the rank is in neither set. This is Kleene's
three-valued logic: the negation of unknown is unknown.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

from cockpit.data.filter.names import FLAGS, STATISTICS, TEXTS, numbers
from cockpit.data.filter.syntax import (
    All,
    Any,
    Arithmetic,
    Comparison,
    Condition,
    Expression,
    Filter,
    Flag,
    Name,
    Not,
    Number,
    Over,
    Text,
)
from cockpit.data.store import Store, Topic

T = TypeVar("T")

TOPICS = (Topic.GRID, Topic.RANKS, Topic.CURVES, Topic.EVENTS)

Column = Mapping[int, float] | float | None  # by rank, or one value for all; None: no value
Verdict = tuple[frozenset[int], frozenset[int]]  # ranks that match, and ranks that do not


@dataclass(frozen=True)
class Matches:
    """The ranks selected by a filter, and the number of ranks without the values that the filter needs."""

    ranks: frozenset[int]
    unknown: int


def matching(store: Store, chosen: Filter | None, step: int | None = None) -> frozenset[int] | None:
    """The ranks whose values at `step` match the filter; without `step`, their newest values count. None without a
    filter. The result is cached, because several panels use it."""
    return matches(store, chosen, step).ranks if chosen else None


def matches(store: Store, chosen: Filter, step: int | None = None, use: str = "applied") -> Matches:
    """The ranks that match the filter `chosen`. The store caches one result for each value of `use`, that of the newest
    filter. The filter that is applied ("applied") and the one that the user is typing ("typed") therefore have separate
    cached results."""
    return store.once(
        ("filter", use), TOPICS, lambda: _Evaluation(store, step).matches(chosen), (chosen.text, step)
    )


def count_text(store: Store, found: Matches) -> str:
    """The number of matching ranks, such as ``12 of 1024``, and the number of ranks without the values that the filter
    needs."""
    unknown = f" · {found.unknown} without data" if found.unknown else ""
    return f"{len(found.ranks)} of {store.world}{unknown}"


def _intersection(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return reduce(operator.and_, sets)


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return reduce(operator.or_, sets)


_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CALCULATE: dict[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda a, b: a / b if b else math.nan,
}


class _Evaluation:
    """Evaluates a filter for the ranks of a run, with their values at a step."""

    def __init__(self, store: Store, step: int | None) -> None:
        self._store, self._step = store, step
        self._ranks = frozenset(store.state.hellos)

    def matches(self, chosen: Filter) -> Matches:
        yes, no = self._verdict(chosen.condition)
        return Matches(yes, len(self._ranks) - len(yes) - len(no))

    def _verdict(self, condition: Condition) -> Verdict:
        match condition:
            case Comparison():
                return self._compare(condition)
            case Text(name, pattern, equal):
                texts = TEXTS[name][1](self._store)
                same = frozenset(rank for rank, text in texts.items() if text_matches(pattern, text))
                return (same, self._ranks - same) if equal else (self._ranks - same, same)
            case Flag(name):
                has = self._ranks & FLAGS[name][1](self._store)
                return has, self._ranks - has
            case Not(part):
                yes, no = self._verdict(part)
                return no, yes
            case All(parts):
                each = [self._verdict(part) for part in parts]
                return _intersection(yes for yes, _ in each), _union(no for _, no in each)
            case Any(parts):
                each = [self._verdict(part) for part in parts]
                return _union(yes for yes, _ in each), _intersection(no for _, no in each)

    def _compare(self, condition: Comparison) -> Verdict:
        left, right = self._column(condition.left), self._column(condition.right)
        compare = _COMPARE[condition.operator]
        met = _by_rank(compare, left, right)
        known = frozenset(met) & self._ranks
        yes = frozenset(rank for rank, is_met in met.items() if is_met) & self._ranks
        return yes, known - yes

    def _column(self, expression: Expression) -> Column:
        match expression:
            case Number(value):
                return value
            case Name(name):
                return self._values(name)
            case Over(statistic, name):
                return STATISTICS[statistic][1](self._store, self._values(name))
            case Arithmetic(sign, left, right):
                a, b, calculate = self._column(left), self._column(right), _CALCULATE[sign]
                if isinstance(a, float | int) and isinstance(b, float | int):
                    value = calculate(a, b)
                    return value if math.isfinite(value) else None
                return _finite(_by_rank(calculate, a, b))

    def _values(self, name: str) -> dict[int, float]:
        # an axis or a phase may be missing in another state of the run
        known = numbers(self._store).get(name)
        return _finite(known[1](self._store, self._step)) if known else {}


def _finite(values: Mapping[int, float | None]) -> dict[int, float]:
    return {
        rank: value for rank, value in values.items() if value is not None and -math.inf < value < math.inf
    }


def _by_rank(join: Callable[[float, float], T], left: Column, right: Column) -> dict[int, T]:
    """Apply `join` to two columns (values by rank), for the ranks that have a value in both. One of the columns, but
    not both, may be a single number that applies to all ranks.
    """
    if left is None or right is None:
        return {}
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return {rank: join(left[rank], right[rank]) for rank in left.keys() & right.keys()}
    if isinstance(left, Mapping):
        assert isinstance(right, float | int)
        return {rank: join(value, right) for rank, value in left.items()}
    assert isinstance(right, Mapping)
    return {rank: join(left, value) for rank, value in right.items()}


def text_matches(pattern: str, text: str) -> bool:
    """Whether `text` matches `pattern`, in which each ``*`` stands for any characters. The time is linear in the
    lengths of pattern and text. A regular expression with several ``.*`` could backtrack for a long time, and a run may
    send any string.
    """
    first, *parts = pattern.split("*")
    if not parts:
        return text == first
    *middle, last = parts
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
