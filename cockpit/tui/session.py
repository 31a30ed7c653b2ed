"""The objects that all screens of one app share: the source, the store, and the operator's selection."""

from dataclasses import dataclass, field
from pathlib import Path

from cockpit.data.comparison.comparison import Comparison
from cockpit.data.filter import Filter
from cockpit.data.metrics import Against
from cockpit.data.run_folders.console import Console
from cockpit.data.sources.source import Source
from cockpit.data.store import Store


@dataclass
class Selection:
    """The operator's selection. A selection made on one screen applies to all screens."""

    rank: int | None = 0
    layer: int | None = None
    expert: int | None = None
    step: int | None = None  # the step to look at; None follows the newest step
    metric: str = ""  # key of the metric of the rank grid; "" is the first available one
    group: str | None = None  # axis by which ranks are grouped, or "node"; None: the outermost axis
    against: Against = Against.PEERS  # what the colours of ranks show
    filter: Filter | None = None  # panels dim ranks that do not match; see `cockpit.data.filter.matching`


@dataclass(frozen=True)
class Session:
    """The objects that all screens of one app share. `recorded`: whether the source plays a recording."""

    source: Source
    store: Store
    recorded: bool = False
    selection: Selection = field(default_factory=Selection)
    comparison: Comparison = field(default_factory=Comparison)  # runs that the curves show beside this one
    folder: Path | None = None  # the run's folder, if it is on this machine
    console: Console = field(default_factory=Console)  # the output of the run
