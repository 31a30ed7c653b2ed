"""For each type of update from the hub, the topics (kinds of data that panels show) that it changes, and its table in
an export."""

from enum import Enum
from typing import NamedTuple

from agents.protocol import (
    Alert,
    Board,
    CommandState,
    Event,
    Experts,
    Gone,
    Hello,
    Loads,
    Peers,
    Pulse,
    Recalled,
    Step,
    Summary,
    Timeline,
    TrialState,
    Unknown,
    Update,
    Vitals,
)


class Topic(Enum):
    """A kind of data that panels depend on."""

    GRID = "grid"  # ranks and their coordinates
    RANKS = "ranks"
    CURVES = "curves"
    EXPERTS = "experts"
    PIPELINE = "pipeline"
    BOARD = "board"
    PULSE = "pulse"
    EVENTS = "events"


class UpdateKind(NamedTuple):
    """What a type of update changes: its topics, and its table in an export."""

    topics: tuple[Topic, ...]  # the topics that such an update changes
    table: str = ""  # its table in an export; "" if it is not exported
    items: str = ""  # the list field that has one row per item in the table


UPDATE_KINDS: dict[type[Update], UpdateKind] = {
    Hello: UpdateKind(tuple(Topic), "hellos"),
    Gone: UpdateKind((Topic.RANKS, Topic.PULSE, Topic.EVENTS), "gone"),
    Board: UpdateKind((Topic.BOARD,), "knobs", "knobs"),
    Step: UpdateKind((Topic.RANKS,), "ranks"),
    Summary: UpdateKind((Topic.CURVES,), "steps"),
    Experts: UpdateKind((Topic.EXPERTS,), "experts", "layers"),
    Loads: UpdateKind((Topic.EXPERTS,), "loads", "layers"),
    Timeline: UpdateKind((Topic.PIPELINE,), "timelines", "actions"),
    Peers: UpdateKind((Topic.RANKS,), "peers", "sent"),
    Pulse: UpdateKind((Topic.PULSE,), "pulses"),
    Vitals: UpdateKind((Topic.RANKS,), "vitals"),
    Event: UpdateKind((Topic.EVENTS,), "events"),
    Alert: UpdateKind((Topic.EVENTS,), "alerts"),
    CommandState: UpdateKind((Topic.BOARD, Topic.CURVES, Topic.EVENTS), "commands"),
    TrialState: UpdateKind((Topic.BOARD, Topic.EVENTS), "trials"),
    Recalled: UpdateKind((Topic.CURVES, Topic.EVENTS)),
    Unknown: UpdateKind(()),
}
