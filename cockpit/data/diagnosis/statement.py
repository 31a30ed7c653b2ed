"""The type of all diagnoses: a statement about a run, with the statement's severity."""

from dataclasses import dataclass
from enum import Enum

from cockpit.data import format


class Level(Enum):
    """Severity of a statement; the enum value is the glyph that represents the severity on the screen."""

    GOOD = "✓"
    NOTE = "·"
    WARN = "!"
    BAD = "✗"


@dataclass(frozen=True)
class Diagnosis:
    """A judgement of the state of a run. `text` states the finding with its evidence."""

    level: Level
    text: str
    rank: int | None = None  # the rank that the text names
    cause: str = ""  # the name of an alert or bottleneck, a key of `HEADLINES`
    since: int | None = None  # the step at which the condition began; None: unknown, or it has no beginning
    advice: str = ""  # the best next step

    @property
    def finding(self) -> str:
        """The finding and, if it is known, the step at which the condition began."""
        return self.text if self.since is None else f"{self.text} · since step {format.grouped(self.since)}"

    @property
    def sentence(self) -> str:
        """The finding, the step at which the condition began, and the recommended action."""
        return " · ".join(part for part in (self.finding, self.advice) if part)

    @property
    def headline(self) -> str:
        """The finding in at most three words, in capitals; "" if there is nothing to act on."""
        return HEADLINES.get(self.cause, "") if self.level in (Level.WARN, Level.BAD) else ""


HEADLINES = {
    "failed": "FAILED",
    "nan": "LOSS NOT FINITE",
    "gradient_nan": "GRADIENT NOT FINITE",
    "lost": "RANK LOST",
    "suspended": "RANK SUSPENDED",
    "unreachable": "RANK UNREACHABLE",
    "silent": "RANK SILENT",
    "unheard": "RANK UNHEARD",
    "absent": "RANK ABSENT",
    "stall": "STALLED",
    "collapse": "ROUTER COLLAPSED",
    "straggler": "SLOW RANK",
    "slowdown": "SLOWED DOWN",
    "throttle": "THROTTLED",
    "memory": "MEMORY FULL",
    "loss_spike": "LOSS SPIKE",
    "gradient_spike": "GRADIENT SPIKE",
    "drops": "TOKENS DROPPED",
    "dead_experts": "DEAD EXPERTS",
    "hot_expert": "SKEWED ROUTER",
    "bubble": "BUBBLE-BOUND",
    "ep": "ALL-TO-ALL-BOUND",
    "tp": "TP-BOUND",
    "cp": "CP-BOUND",
    "dp": "DP-BOUND",
    "data": "DATA-BOUND",
}
"""Headlines by the cause of a diagnosis."""
