"""Where a screen's store is fed from, and where its wishes go."""

from typing import Protocol

from agents.client import Asked
from cockpit.store import Store


class ViewerError(PermissionError):
    """This cockpit only watches; the text is one sentence for a person."""


class Feed(Protocol):
    """Fills a store from a thread of its own, until `stop`."""

    operator: bool
    owns_run: bool  # which ends with this cockpit
    target: str  # the run, as `cockpit attach` takes it

    def start(self, store: Store) -> None: ...

    def stop(self) -> None: ...

    def ask(self, asked: Asked) -> None:
        """Pass a proposal, a trial, a word on one, or a question on; by its id the store tells what becomes of it.

        Returns at once. A newer question what a change would do takes the place of an older one. `ViewerError`: not
        from here.
        """
        ...


def viewer_text(feed: Feed) -> str:
    """What one who only watches is told."""
    return f"only watching · to operate: cockpit attach {feed.target} --operator"
