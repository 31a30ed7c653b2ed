"""The interface (`Protocol`) of sources. A source copies the state of a live run, a starting run or a recording
into a `Store`, from which the screens are drawn; it also sends the user's requests to the run, or rejects them."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from agents.requests import Request
from cockpit.data.link import Fault
from cockpit.data.store import Store, Topic


class ViewerError(PermissionError):
    """Raised if a source rejects a request; the message is one sentence for the user."""


class Source(Protocol):
    """Keeps a `Store` up to date with the state of a run, from its own thread, until `stop` is called."""

    operator: bool
    owns_run: bool  # whether the run ends when this cockpit exits
    target: str  # name of the run for `cockpit attach`

    def start(self, store: Store) -> None:
        """Start the thread that fills `store`."""
        ...

    def stop(self) -> None:
        """Stop the thread."""
        ...

    def sample(self, kinds: frozenset[str]) -> None:
        """Request samples of these kinds (see `agents.protocol.Sample`), and no others, until the next call."""
        ...

    def ask(self, asked: Request) -> None:
        """Send a proposal of knob values, the start of a trial, the decision to keep or revert a trial, or a preview
        query. The outcome arrives in the store, under the id of the request.

        Returns at once. A new preview query replaces the previous one. Raises ViewerError if the source rejects the
        request.
        """
        ...


@contextmanager
def faults_reported(store: Store, how_to_continue: str) -> Iterator[None]:
    """Context manager for a source's thread: stores an unexpected error as the fault that the screen shows."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - else the thread would end and the screen would wait forever
        line = traceback.format_exception_only(error)[-1].strip()
        with store.lock:
            store.fault = Fault(line, how_to_continue, traceback.format_exc())
            store.revisions.update(Topic)


def viewer_text(source: Source) -> str:
    """Why a viewer cannot change the run, and how to become an operator."""
    return f"read-only · to change the run: cockpit attach {source.target} --operator"
