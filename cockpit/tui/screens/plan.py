"""Screen 7: hypothetical settings and their predicted effect (what-if), the planned memory compared with the device's
capacity, and the planner's advice."""

from collections.abc import Sequence

from cockpit.data.store import Store
from cockpit.knobs.plan.model import WhatIf
from cockpit.tui.dialogs.board import BoardScreen
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.session import Session
from cockpit.tui.widgets.panel import Panel
from cockpit.tui.widgets.plan.advice import AdvicePanel
from cockpit.tui.widgets.plan.memory import MemoryPanel
from cockpit.tui.widgets.plan.what_if import WhatIfPanel


class Plan(RunScreen):
    """The what-if panel beside the panels with the planned memory and the planner's advice. A small terminal shows one
    panel at a time."""

    NAME = "plan"
    NOT_MEDIUM = frozenset({"charts"})  # hidden by the style sheet in the medium layout

    def __init__(self, session: Session) -> None:
        self.model = WhatIf(session.folder)
        self.what_if = WhatIfPanel(self.model, session.source)
        self.advice = AdvicePanel(self.model)
        # Shown on large terminals.
        self.charts = AdvicePanel(self.model, ("roofline", "strong", "weak"), "charts")
        super().__init__(session)

    def columns(self) -> Sequence[Sequence[Panel]]:
        return ((self.what_if, self.charts), (MemoryPanel(self.model), self.advice))

    def _reachable(self) -> list[str]:
        """The panels that can have the focus. The panel of charts is shown only on a wide terminal; on smaller
        terminals, the key `v` shows the charts in the advice panel."""
        wide = self._layout_class == "-wide"
        return [name for name in super()._reachable() if wide or name != self.charts.id]

    def action_view(self) -> None:
        """If the panel of charts is visible, show its next chart (roofline, strong scaling, weak scaling). Otherwise
        show the next list or chart of the advice panel, and switch to this panel if it is not visible."""
        panel = self.charts if self.charts.is_on_screen else self.advice
        panel.next_view()
        if not panel.is_on_screen:
            panel.focus()

    async def action_open(self) -> None:
        """Open the knob board with the hypothetical values as unsent edits. If none of them can be changed while the
        run trains, show the arguments of `engine run` for a restart instead."""
        store: Store = self.session.store
        with store.lock:
            live = self.what_if.live(store)
            self.what_if.notice = ""
            if not live and self.model.changes:
                self.what_if.notice = f"needs a restart: engine run LAYOUT {self.what_if.arguments()}"
        if live or not self.model.changes:
            board = BoardScreen(self.session.source, store)
            board.controller.take_over(live)
            self.app.push_screen(board)
        self.what_if.redraw()
