"""The jump targets that the `:` prompt accepts: a step, a rank, a layer, an expert, a screen, a mark, or the newest
step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cockpit.data import format
from cockpit.data.store import Store

LEGAL = "a step such as 120, last, rank 17, layer 3, expert 3.12 (layer.expert), mark NAME, or a screen"
MOST_CHARACTERS = 100

_RULES = {
    "step": re.compile(r"(?:step )?([0-9]{1,15})"),
    "rank": re.compile(r"r(?:ank)? ?([0-9]{1,8})"),
    "layer": re.compile(r"layer ([0-9]{1,8})"),
    "expert": re.compile(r"e(?:xpert)? ?([0-9]{1,8})\.([0-9]{1,8})"),
    "mark": re.compile(r"(?:mark |')(\S+)"),
}
WORDS = ("last", "step ", "rank ", "layer ", "expert ", "mark ")


class JumpError(ValueError):
    """Raised if the input does not name a valid jump target; the message is one sentence."""


@dataclass(frozen=True)
class Jump:
    """The target of a jump; fields that are None or empty keep the current selection. `last`: follow the newest
    step."""

    step: int | None = None
    rank: int | None = None
    layer: int | None = None
    expert: int | None = None
    screen: str = ""
    last: bool = False

    @property
    def text(self) -> str:
        """The jump as text, such as ``step 120`` or ``expert 12 of layer 3``."""
        if self.last:
            return "the newest step"
        if self.expert is not None:
            return f"expert {self.expert} of layer {self.layer}"
        numbers = {"step": self.step, "rank": self.rank, "layer": self.layer}
        return next(
            (f"{name} {format.grouped(n)}" for name, n in numbers.items() if n is not None), self.screen
        )


def parse_jump(text: str, store: Store, screens: Sequence[str], any_step: bool = False) -> Jump:
    """Parse `text` as the target of a jump. `any_step`: accept a step later than the newest one, because a recording
    may still grow. Raises JumpError."""
    words = " ".join(text[: MOST_CHARACTERS + 1].lower().split())
    if len(words) > MOST_CHARACTERS:
        raise JumpError(f"more than {MOST_CHARACTERS} characters; legal: {LEGAL}")
    if words == "last":
        return Jump(last=True)
    if words in screens:
        return Jump(screen=words)
    for kind, rule in _RULES.items():
        if found := rule.fullmatch(words if kind != "mark" else " ".join(text.split())):
            return _checked(kind, found.groups(), store, any_step)
    shown = format.clean(words)[:24]
    raise JumpError(f"{shown!r} is not a place to jump to; legal: {LEGAL}: {', '.join(screens)}")


def _checked(kind: str, found: Sequence[str], store: Store, any_step: bool) -> Jump:
    """The jump to a target whose `kind` is, for example, "step" or "rank"; `found` contains the target's name or
    numbers. Raises JumpError if the run does not have this step, rank, layer, expert or mark."""
    if kind == "mark":
        return _mark(found[0], store)
    numbers = [int(one) for one in found]
    if kind == "step":
        if not any_step and (store.step is None or numbers[0] > store.step):
            newest = (
                "no step is done yet" if store.step is None else f"the newest is {format.grouped(store.step)}"
            )
            raise JumpError(f"there is no step {format.grouped(numbers[0])}: {newest}")
        return Jump(step=numbers[0])
    if kind == "rank":
        if numbers[0] not in store.state.hellos:
            raise JumpError(
                f"there is no rank {numbers[0]}; legal: 0 to {max(store.state.hellos, default=0)}"
            )
        return Jump(rank=numbers[0], screen="ranks")
    loads = {one.layer: len(one.load) for one in store.state.experts.layers} if store.state.experts else {}
    if numbers[0] not in loads:
        legal = f"layers with experts: {_ranges(sorted(loads))}" if loads else "no expert layer has reported"
        raise JumpError(f"layer {numbers[0]} has no experts; {legal}")
    if kind == "layer":
        return Jump(layer=numbers[0], screen="experts")
    if numbers[1] >= loads[numbers[0]]:
        raise JumpError(f"layer {numbers[0]} has no expert {numbers[1]}; legal: 0 to {loads[numbers[0]] - 1}")
    return Jump(layer=numbers[0], expert=numbers[1], screen="experts")


def _mark(name: str, store: Store) -> Jump:
    mark = store.named_marks.get(name)
    if mark is None:
        known = ", ".join(one.name for one in store.named_marks) or "none yet; the key ' sets one"
        raise JumpError(f"there is no mark {format.clean(name)[:24]!r}; marks: {known}")
    return Jump(step=mark.step)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text, with consecutive numbers as ranges, such as ``0 to 3, 7``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts)


def jump_completions(text: str, store: Store, screens: Sequence[str]) -> list[str]:
    """The valid inputs that start with `text`."""
    marks = [f"mark {mark.name}" for mark in store.named_marks]
    return [one for one in (*WORDS, *screens, *marks) if one.startswith(text.lower()) and one != text]
