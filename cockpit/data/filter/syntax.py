"""The nodes of the syntax tree of a filter, and the vocabulary of the filter language."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Number:
    """A constant."""

    value: float


@dataclass(frozen=True)
class Name:
    """The name of a per-rank number, such as ``own_ms``."""

    name: str


@dataclass(frozen=True)
class Over:
    """A statistic over ranks, such as ``median(own_ms)``."""

    statistic: str
    name: str


@dataclass(frozen=True)
class Arithmetic:
    """Two expressions joined by ``+ - *`` or ``/``."""

    operator: str
    left: "Expression"
    right: "Expression"


Expression = Number | Name | Over | Arithmetic


@dataclass(frozen=True)
class Comparison:
    """Two expressions joined by one of `COMPARISONS`."""

    left: Expression
    operator: str
    right: Expression


@dataclass(frozen=True)
class Text:
    """Compares a text field of each rank, such as its host, with a pattern in which ``*`` stands for any characters."""

    name: str
    pattern: str
    equal: bool


@dataclass(frozen=True)
class Flag:
    """A property that a rank either has or does not have, such as ``lost``."""

    name: str


@dataclass(frozen=True)
class Not:
    part: "Condition"


@dataclass(frozen=True)
class All:
    parts: tuple["Condition", ...]


@dataclass(frozen=True)
class Any:
    parts: tuple["Condition", ...]


Condition = Comparison | Text | Flag | Not | All | Any


@dataclass(frozen=True)
class Filter:
    """A parsed filter, and its text as the user typed it."""

    text: str
    condition: Condition


@dataclass(frozen=True)
class Vocabulary:
    """The names that a filter on a run may use, each with its meaning."""

    numbers: Mapping[str, str]
    texts: Mapping[str, str]
    flags: Mapping[str, str]
    statistics: Mapping[str, str]


COMPARISONS = ("=", "!=", "<", "<=", ">", ">=")
EQUALITIES = COMPARISONS[:2]
SUFFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MOST_CHARACTERS = 500
MOST_NESTED = 32  # maximum depth of parentheses and negations
