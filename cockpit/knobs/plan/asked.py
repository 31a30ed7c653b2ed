"""What-if planning for a run without a layout: hypothetical knob values, and the previews that the run itself computes
for them. Preview queries change nothing, so viewers may send them too.
"""

from agents.protocol import KnobState, Value
from cockpit.data.sources.source import Source
from cockpit.data.store import Store
from cockpit.knobs.edits import Edits
from cockpit.knobs.preview import PreviewQuery, supported
from cockpit.knobs.values import value_knobs


class AskedWhatIf:
    """Hypothetical values for the knobs of the running job, and the preview that the run computes for these values.
    Callers hold the store's lock."""

    def __init__(self, source: Source) -> None:
        self.edits = Edits()
        self.preview = PreviewQuery(source.ask)
        self._rows: list[KnobState] = []

    def version(self) -> object:
        """A value that changes whenever the selected row, the hypothetical values or the preview's answer changes.
        Panels then redraw."""
        answer = self.preview.answer
        return self.edits.row, tuple(self.edits.changes.items()), self.preview.status, answer and answer.id

    @staticmethod
    def answers(store: Store) -> bool:
        """Whether the run answers preview queries."""
        return supported(store) and bool(value_knobs(store.state.board))

    def update(self, store: Store) -> None:
        """Read the knobs and the run's answer, or send a preview query once the hypothetical values are stable."""
        self._rows = value_knobs(store.state.board)
        self.preview.update(store, self.edits.pending(self._rows))

    @property
    def rows(self) -> list[KnobState]:
        return self._rows

    @property
    def changes(self) -> dict[str, Value]:
        return self.edits.pending(self._rows)

    def move(self, by: int) -> None:
        if self._rows:
            self.edits.row = (min(self.edits.row, len(self._rows) - 1) + by) % len(self._rows)

    def turn(self, by: int) -> None:
        if self._rows:
            self.edits.next_value(self._rows, by, 0)

    def reset(self) -> None:
        self.edits.discard()
