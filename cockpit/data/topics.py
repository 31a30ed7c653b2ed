"""Topics that panels depend on, and the topics that each update changes."""

from enum import Enum

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


TOPICS: dict[type[Update], tuple[Topic, ...]] = {
    Hello: tuple(Topic),
    Gone: (Topic.RANKS, Topic.PULSE, Topic.EVENTS),
    Board: (Topic.BOARD,),
    Step: (Topic.RANKS,),
    Summary: (Topic.CURVES,),
    Experts: (Topic.EXPERTS,),
    Loads: (Topic.EXPERTS,),
    Timeline: (Topic.PIPELINE,),
    Peers: (Topic.RANKS,),
    Pulse: (Topic.PULSE,),
    Vitals: (Topic.RANKS,),
    Unknown: (),
    Event: (Topic.EVENTS,),
    Alert: (Topic.EVENTS,),
    CommandState: (Topic.BOARD, Topic.CURVES, Topic.EVENTS),
    TrialState: (Topic.BOARD, Topic.EVENTS),
    Recalled: (Topic.CURVES, Topic.EVENTS),
}
