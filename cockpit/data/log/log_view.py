"""The content of the log screen: entries filtered by kind, level and text, with repeated entries grouped."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cockpit.data.log.run_log import Kind, LogEntry, ended_after

LEVELS = ("info", "warning", "error")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")

# The choices of the kind filter, in the order of its key.
KINDS: tuple[tuple[str, frozenset[Kind]], ...] = (
    ("all", frozenset(Kind)),
    ("changes and trials", frozenset({Kind.CHANGE, Kind.TRIAL, Kind.CHECK})),
    ("alerts", frozenset({Kind.ALERT, Kind.ENDED})),
    ("checkpoints", frozenset({Kind.CHECKPOINT, Kind.RESUME})),
    ("generated text", frozenset({Kind.SAMPLE})),
    ("other events", frozenset({Kind.EVENT})),
)
FROM_LEVEL = (("all", 0), ("warnings and errors", 1), ("errors", 2))
"""The choices of the level filter: the name, and the lowest level as an index into `LEVELS`."""


@dataclass(frozen=True)
class LogFilter:
    """Selects the entries that the log screen lists. `kind` and `level` are indices in `KINDS` and `FROM_LEVEL`; an
    entry matches if its text or its source contains `text`, ignoring case."""

    kind: int = 0
    level: int = 0
    text: str = ""

    def next_kind(self, by: int = 1) -> "LogFilter":
        return replace(self, kind=(self.kind + by) % len(KINDS))

    def next_level(self) -> "LogFilter":
        return replace(self, level=(self.level + 1) % len(FROM_LEVEL))

    def passes(self, entry: LogEntry) -> bool:
        if entry.kind not in KINDS[self.kind][1]:
            return False
        # The end of an alert passes the filter as a warning, whatever the level of its event is.
        level = "warning" if entry.kind is Kind.ENDED else entry.level
        if LEVELS.index(level) < FROM_LEVEL[self.level][1]:
            return False
        text = self.text.casefold()
        return not text or text in entry.text.casefold() or text in entry.source.casefold()

    def __str__(self) -> str:
        parts = [KINDS[self.kind][0]] if self.kind else []
        parts += [FROM_LEVEL[self.level][0]] if self.level else []
        parts += [f"“{self.text}”"] if self.text else []
        return " · ".join(parts)


@dataclass(frozen=True)
class LogGroup:
    """Consecutive entries with equal keys (`_sameness`), shown as one line of the list. `end`: the entry that reports
    the end of the alert in `first`.
    """

    entries: tuple[LogEntry, ...]
    end: LogEntry | None = None

    @property
    def first(self) -> LogEntry:
        return self.entries[0]

    @property
    def shown(self) -> LogEntry:
        """The entry whose text is shown for the group: the newest entry other than the end of an alert."""
        return next((one for one in reversed(self.entries) if one.kind is not Kind.ENDED), self.entries[-1])

    @property
    def count(self) -> int:
        """How many times the group's event occurred. An alert's beginning and end count as one occurrence."""
        raised = sum(one.kind is not Kind.ENDED for one in self.entries)
        return raised or len(self.entries)

    @property
    def level(self) -> str:
        """The most severe level of the entries."""
        return max((one.level for one in self.entries), key=LEVELS.index)

    @property
    def lasted_s(self) -> float | None:
        """How long the newest alert of the group was active, in seconds; None while it is active."""
        return None if self.end is None else max(0.0, self.end.time_s - self.shown.time_s)


def groups(entries: Sequence[LogEntry], only: LogFilter) -> list[LogGroup]:
    """The entries that pass the filter, with consecutive entries grouped if they differ only in numbers or report the
    same alert (`_sameness`); oldest first."""
    ends = ended_after(entries)
    found: list[LogGroup] = []
    before: tuple[object, ...] | None = None
    for entry in entries:
        if not only.passes(entry):
            continue
        same = _sameness(entry)
        if found and same == before:
            found[-1] = LogGroup((*found[-1].entries, entry))
        else:
            found.append(LogGroup((entry,)))
        before = same
    return [replace(group, end=ends.get(group.shown.key)) for group in found]


def _sameness(entry: LogEntry) -> tuple[object, ...]:
    """A key that is equal for events that differ only in numbers, and for alerts of the same subject. Each knob change
    and each trial has a key of its own, so that it is never grouped with another change or trial.
    """
    if about := entry.command or entry.trial:
        return entry.kind, about.id
    if subject := entry.subject:
        return Kind.ALERT, *subject
    if entry.kind is Kind.EVENT:
        return entry.kind, entry.level, entry.source, _without_numbers(entry.text)
    return entry.kind, entry.time_s, entry.text


@lru_cache(maxsize=4096)
def _without_numbers(text: str) -> str:
    return _NUMBER.sub("#", text)
