"""What all screens of one app share: the source, the store, and what the operator has selected."""

from dataclasses import dataclass, field

from cockpit.data.sources.source import Source
from cockpit.data.store import Store


@dataclass
class Selection:
    """What the operator has selected. A selection made on one screen holds on all screens."""

    rank: int | None = 0
    layer: int | None = None
    expert: int | None = None
    step: int | None = None  # the step to look at; None follows the newest step


@dataclass(frozen=True)
class Session:
    """The shared objects of one app. `recorded`: the source plays a recording."""

    source: Source
    store: Store
    recorded: bool = False
    selection: Selection = field(default_factory=Selection)
