"""Exits the cockpit or opens another run. If this would end the current run, the cockpit asks for confirmation first,
and offers to save a checkpoint unless the run saves one at its end."""

import uuid

from agents.client import whoami
from agents.protocol import Propose
from cockpit.data.plain import REFUSALS
from cockpit.data.run_folders.next_run import NextRun
from cockpit.data.sources.source import Source
from cockpit.data.store import Store
from cockpit.knobs.controller import run_ended
from cockpit.tui.dialogs.ending import Answer, Ending
from cockpit.tui.terminal.terminal_app import TerminalApp

SAVING_S = 120.0  # how long the notification about the final checkpoint stays


class RunExit:
    """Exits the cockpit or switches to another run. `store` and `source` belong to the run that `app` shows."""

    def __init__(self, app: TerminalApp, store: Store, source: Source) -> None:
        self._app, self._store, self._source = app, store, source
        self.next_run: NextRun | None = None  # the run to open after the app has ended
        # the request to save and end the run, sent before the cockpit exits
        self._final_save: Propose | None = None

    def quit(self) -> None:
        """Exit; ask for confirmation first if the exit ends the run."""
        self.next_run = None
        if not self._ends_run() or isinstance(self._app.screen, Ending):
            self._app.exit()
        else:
            self._app.push_screen(Ending(again="q,ctrl+c"), self._end)

    def _ends_run(self) -> bool:
        """Whether the run ends when this cockpit exits."""
        with self._store.lock:
            return self._source.owns_run and self._store.step is not None and not run_ended(self._store)

    def to_next_run(self, following: NextRun | None) -> None:
        """Exit and open another run. Ask for confirmation first if the exit ends this run."""
        if following is None:
            return
        self.next_run = following
        if self._ends_run():
            self._app.push_screen(Ending(), self._end)
        else:
            self._app.exit()

    def _end(self, answer: Answer | None) -> None:
        """Act on the user's answer in the confirmation dialog. After the answer "save", the run saves a checkpoint and
        ends, and then the app exits."""
        if answer == "stay":
            self.next_run = None
        elif answer == "end":
            self._app.exit()
        elif answer == "save":
            self._final_save = Propose(uuid.uuid4().hex, {"save": True, "stop": True}, who=whoami())
            self._source.ask(self._final_save)
            self._app.say(
                "The run saves a checkpoint and then ends; press q to quit at once", timeout=SAVING_S
            )

    def exit_if_ended(self) -> None:
        """Exit once the run has saved a checkpoint and ended. If the run rejected the request to save and end, show the
        reason and do not exit."""
        request = self._final_save
        if request is None:
            return
        command = self._store.state.commands.get(request.id)
        why = self._store.denied.get(request.id) or (
            command.why if command and command.state in REFUSALS else ""
        )
        if why:
            self._final_save = self.next_run = None
            self._app.clear_notifications()
            self._app.say(f"the run continues: {why}", severity="error")
        elif run_ended(self._store):
            self._app.exit()
