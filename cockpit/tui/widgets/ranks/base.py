"""Base class of the panels about ranks, with the keys that these panels share."""

from cockpit.data.metrics import available
from cockpit.data.ranks.rank_levels import levels_of, worst_first
from cockpit.tui.session import Selection
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.ranks import view


class RankPanel(Panel):
    """A panel that depends on the selected rank and metric, on how ranks are grouped, and on the baseline of the
    colours (the rank's peers, its own earlier steps, or none). All `RankPanel`s share one selection."""

    def __init__(self, id: str, selection: Selection) -> None:
        super().__init__(id)
        self.selection = selection
        self._jumped: int | None = None  # the rank that the last jump to the worst rank selected

    def choice(self) -> object:
        return view.choice(self.selection)

    def changed(self) -> None:
        """Redraw all `RankPanel`s of this screen, because the user has changed the selection."""
        for panel in self.screen.query(RankPanel):
            panel.redraw()

    def action_metric(self, step: int = 1) -> None:
        with self._store.lock:
            keys = [metric.key for metric in available(self._store)]
        at = keys.index(self.selection.metric) if self.selection.metric in keys else 0
        self.selection.metric = keys[(at + step) % len(keys)]
        self.changed()

    def action_pick(self) -> None:
        """Open the list of metrics."""
        from cockpit.tui.dialogs.metric_picker import MetricPicker

        def chosen(key: str | None) -> None:
            if key is not None:
                self.selection.metric = key
                self.changed()

        self.app.push_screen(MetricPicker(self._store, self.selection), chosen)

    def action_regroup(self) -> None:
        with self._store.lock:
            known, current = view.groupings(self._store), view.group_of(self._store, self.selection)
        if current is not None:
            self.selection.group = known[(known.index(current) + 1) % len(known)]
        self.changed()

    def action_compare(self) -> None:
        at = view.COMPARED.index(self.selection.against)
        self.selection.against = view.COMPARED[(at + 1) % len(view.COMPARED)]
        self.changed()

    def action_worst(self) -> None:
        """Select the worst rank. If this key has already selected the worst rank, select the next worst."""
        with self._store.lock:
            metric = view.metric_of(self._store, self.selection)
            readings = view.readings_of(self._store, self.selection, metric)
            worst = worst_first(metric, readings, levels_of(self._store, metric, readings))
            ranks = view.filtered(self._store, self.selection, worst)
        again = self._jumped is not None and self._jumped == self.selection.rank and self._jumped in ranks
        at = ranks.index(self._jumped) + 1 if again and self._jumped is not None else 0
        if ranks:
            self._jumped = self.selection.rank = ranks[at % len(ranks)]
            self.changed()
