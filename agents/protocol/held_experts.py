"""The experts that a rank holds, by layer, as facts (name-value pairs) in the rank's hello.

The value is a list of groups such as ``3-5:0-7;6:0,2,9``: layers, a colon, and the experts held in each of these
layers. A list that is too long for one fact continues in the facts ``experts_held_2``, ``experts_held_3`` and so on.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from agents.protocol.base import Value

HELD: Final = "experts_held"
MOST_LETTERS = 256  # maximum length of a fact
MOST_FACTS = 200
RANGES = 6  # ranges in one part of a group, so that a group fits into a fact: a range has up to 19 characters
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class Held(NamedTuple):
    """A set of layers and a set of experts: a rank holds each of these experts in each of these layers."""

    layers: tuple[range, ...]
    experts: tuple[range, ...]

    def has(self, layer: int, expert: int) -> bool:
        return any(layer in one for one in self.layers) and any(expert in one for one in self.experts)


def held_facts(experts_by_layer: Mapping[int, Iterable[int]]) -> dict[str, Value]:
    """The facts that list the experts of a rank; empty if the rank holds none, or if the list needs more than
    `MOST_FACTS` facts."""
    layers: dict[tuple[int, ...], list[int]] = {}
    for layer, experts in experts_by_layer.items():
        layers.setdefault(tuple(sorted(experts)), []).append(layer)
    texts = [""]
    for experts, those in layers.items():
        for part in _parts(experts):
            for some in _parts(those):
                group = f"{some}:{part}"
                if len(texts[-1]) + 1 + len(group) > MOST_LETTERS:
                    texts.append("")
                texts[-1] += f";{group}" if texts[-1] else group
    if not texts[0] or len(texts) > MOST_FACTS:
        return {}
    return {_name(number): text for number, text in enumerate(texts, 1)}


def held_texts(facts: Mapping[str, Value]) -> tuple[str, ...]:
    """The values of the facts `experts_held`, `experts_held_2` and so on; ranks with equal values hold the same
    experts."""
    texts: list[str] = []
    while isinstance(text := facts.get(_name(len(texts) + 1)), str):
        texts.append(text)
    return tuple(texts)


def read_held(texts: Sequence[str]) -> list[Held]:
    """Parse the strings that `held_texts` returns. Malformed groups are skipped."""
    found = []
    for group in ";".join(texts).split(";"):
        layers, _, experts = group.partition(":")
        held = Held(tuple(_ranges(layers)), tuple(_ranges(experts)))
        if held.layers and held.experts:
            found.append(held)
    return found


def _name(number: int) -> str:
    return HELD if number == 1 else f"{HELD}_{number}"


def _parts(numbers: Iterable[int]) -> list[str]:
    """Write the numbers as comma-separated ranges, such as ``0-3,7``, in as many strings as needed: a string has at
    most `RANGES` ranges."""
    spelled = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        part = [number for _, number in run]
        spelled.append(f"{part[0]}-{part[-1]}" if len(part) > 1 else f"{part[0]}")
    return [",".join(spelled[at : at + RANGES]) for at in range(0, len(spelled), RANGES)]


def _ranges(text: str) -> Iterator[range]:
    for one in text.split(","):
        if match := _RANGE.fullmatch(one):
            yield range(int(match[1]), int(match[2] or match[1]) + 1)
