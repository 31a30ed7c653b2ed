"""The hello messages of all ranks (the first message of a rank, with its properties), with equal strings and facts
stored only once.

Most strings in the hello messages, such as the run's name, are equal on all ranks. The facts (a dictionary of
properties to show, such as the model size) are usually equal on all ranks, or on ranks with the same experts. If
each were stored in full, the hello messages of 4,096 ranks would take 15 MiB.
"""

from collections.abc import Mapping

from msgspec import structs

from agents.protocol import Facts, Hello

TEXTS = ("run", "host", "device", "layout")
MOST = (
    1 << 16
)  # maximum number of shared strings and facts; beyond it, all are forgotten, and later hellos share anew


class Hellos(dict[int, Hello]):
    """Maps each rank to its hello message, stored as a copy that reuses equal strings and facts of earlier hello
    messages."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, str] = {}
        self._facts: dict[int, Facts] = {}  # by hash
        self._capabilities: list[str] = []

    def __setitem__(self, rank: int, hello: Hello) -> None:
        if len(self._texts) + len(self._facts) > MOST:
            self._texts.clear()
            self._facts.clear()
        texts = {name: self._text(getattr(hello, name)) for name in TEXTS}
        if hello.capabilities != self._capabilities:
            self._capabilities = hello.capabilities
        shared = structs.replace(
            hello, **texts, facts=self._same(hello.facts), capabilities=self._capabilities
        )
        super().__setitem__(rank, shared)

    def __copy__(self) -> "Hellos":
        same = Hellos()
        same.update(self)
        return same

    def _text(self, text: str) -> str:
        return self._texts.setdefault(text, text)

    def _same(self, facts: Mapping[str, object]) -> Facts:
        key = hash(tuple(facts.items()))
        known = self._facts.get(key)
        if known is not None and _equal(known, facts):
            return known  # before any string is looked up, because most ranks have known facts
        shared = {
            self._text(name): self._text(value) if isinstance(value, str) else value
            for name, value in facts.items()
        }
        self._facts.setdefault(key, shared)  # type: ignore[arg-type]
        return shared  # type: ignore[return-value]


def _equal(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Whether two dictionaries of facts are equal in keys, values and types of values. The caller must make sure that
    both have their keys in the same order. The types matter because True == 1, but the two are shown differently."""
    return one == other and [*map(type, one.values())] == [*map(type, other.values())]
