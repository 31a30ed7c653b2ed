"""The settings of the run as a modal screen."""

from textual.app import ComposeResult

from cockpit.data.store import Store
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.dialogs.help import Help
from cockpit.tui.keys.dialog_bindings import INFO
from cockpit.tui.keys.general_bindings import LIST
from cockpit.tui.session import Session
from cockpit.tui.widgets.footer import FittedFooter
from cockpit.tui.widgets.info.panel import InfoPanel


class InfoScreen(Dialog[None]):
    """A dialog that shows the run's settings and the paths of its files, and can be opened over any screen."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.panel = InfoPanel(session.folder, session.source.target)

    def compose(self) -> ComposeResult:
        yield self.panel
        yield FittedFooter()

    def on_mount(self) -> None:
        self.set_focus(self.panel)

    def update_from(self, store: Store) -> None:
        self.panel.update_from(store)

    def action_help(self) -> None:
        self.app.push_screen(Help(self.panel.TITLE, self.panel.HELP, {"Info": (*INFO, *LIST)}))

    def action_close(self) -> None:
        self.dismiss(None)
