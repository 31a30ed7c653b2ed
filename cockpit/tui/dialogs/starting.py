"""Screen shown while a run that the cockpit launched is starting: its progress, and the last lines of its output."""

import time
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.widgets import Static

from cockpit.data import format
from cockpit.data.diagnosis.diagnosis import Level
from cockpit.data.sources.engine_process import EngineProcess
from cockpit.data.store import Store
from cockpit.tui.dialogs.dialog import Dialog
from cockpit.tui.drawing.theme import palette


class Starting(Dialog[bool]):
    """Screen that closes when the first step is done. If the engine exits before the first step is done, the app exits
    with status 1."""

    BINDINGS: ClassVar[list[Binding]] = [  # type: ignore[assignment]
        Binding("q,ctrl+c", "app.quit", "stop the run and quit", id="starting.quit")
    ]

    def __init__(self, engine: EngineProcess) -> None:
        super().__init__()
        self._engine = engine
        self._since = time.monotonic()
        self._shown = Text()
        self._progress = Static(id="progress")  # kept, because an update may come before it is mounted

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "Starting a run on this machine"
            dialog.border_subtitle = "q stops it"
            yield self._progress

    def update_from(self, store: Store) -> None:
        if store.summary:
            self.dismiss(True)
        elif self._engine.exit_status is not None:
            self.app.exit(return_code=1)
        else:
            self._show(store)

    def _show(self, store: Store) -> None:
        colours = palette(self.app.theme)
        here, world = len(store.present), store.world
        stages = (
            (True, f"engine started, process {self._engine.pid}"),
            (store.last_message_at is not None, "hub answers"),
            (bool(world) and here == world, f"ranks joined  {here}/{world}" if world else "ranks joined"),
            (bool(store.summary), "first step"),
        )
        text = Text()
        waiting = True
        for done, stage in stages:
            if done:
                text.append(f" {Level.GOOD.value} ", colours.level[Level.GOOD])
                text.append(f"{stage}\n", colours.text)
            else:
                glyph = "▸" if waiting else format.MISSING
                text.append(f" {glyph} {stage}", colours.accent if waiting else colours.faint)
                if waiting:
                    text.append(f"  {time.monotonic() - self._since:.0f} s", colours.dim)
                text.append("\n")
                waiting = False
        text.append("\n")
        for line in self._engine.last_lines(3):
            text.append(f" {format.clean(line)[:120]}\n", colours.faint)
        if text != self._shown:
            self._shown = text
            self._progress.update(text)
