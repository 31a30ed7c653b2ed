"""Where a screen's store is fed from, and where its wishes go."""

from collections.abc import Mapping
from typing import Protocol

from agents.wire import Value
from cockpit.store import Store


class ViewerError(PermissionError):
    """This cockpit only watches."""


class Feed(Protocol):
    """Fills a store from a thread of its own, until `stop`."""

    operator: bool
    target: str  # the run, as `cockpit attach` takes it

    def start(self, store: Store) -> None: ...

    def stop(self) -> None: ...

    def propose(self, changes: Mapping[str, Value], base: int | None) -> str:
        """Ask for a change of the board of revision `base`; its id, by which the store tells its fate.

        `ViewerError`: not operator.
        """
        ...
