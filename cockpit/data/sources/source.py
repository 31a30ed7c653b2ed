"""Where a screen's store is fed from, and where its wishes go."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from agents.requests import Request
from cockpit.data.store import Fault, Store, Topic


class ViewerError(PermissionError):
    """This cockpit only watches; the text is one sentence for a person."""


class Source(Protocol):
    """Fills a store from a thread of its own, until `stop`."""

    operator: bool
    owns_run: bool  # which ends with this cockpit
    target: str  # the run, as `cockpit attach` takes it

    def start(self, store: Store) -> None: ...

    def stop(self) -> None: ...

    def ask(self, asked: Request) -> None:
        """Pass a proposal, a trial, a word on one, or a question on; by its id the store tells what becomes of it.

        Returns at once. A newer question what a change would do takes the place of an older one. `ViewerError`: not
        from here.
        """
        ...


@contextmanager
def faults_told(store: Store, go_on: str) -> Iterator[None]:
    """Around the work of a feed's thread: what ends it unforeseen is put in the store, where a screen says so."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a thread that ends without a word leaves a picture that seems to wait
        line = traceback.format_exception_only(error)[-1].strip()
        with store.lock:
            store.fault = Fault(line, go_on, traceback.format_exc())
            store.revisions.update(Topic)


def viewer_text(feed: Source) -> str:
    """What one who only watches is told."""
    return f"only watching · to operate: cockpit attach {feed.target} --operator"
