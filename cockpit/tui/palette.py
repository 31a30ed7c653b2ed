"""The command palette: finds screens, panels, actions, metrics, knobs, themes, marks, anomalies and runs by their
names.

Names come from the run, so they are shown as plain text, never as markup.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.text import Text
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.dom import DOMNode
from textual.markup import escape
from textual.screen import Screen

from agents.rundir.runs import list_runs
from cockpit.data import format
from cockpit.data.filter import matching
from cockpit.data.metrics import available
from cockpit.data.navigation.anomalies import anomalies
from cockpit.data.navigation.jump import Jump
from cockpit.data.sources.connection import runs_dir
from cockpit.data.store import Store
from cockpit.tui.drawing.themes import HUES, Depth, offered
from cockpit.tui.keys.action import Action, spelled
from cockpit.tui.keys.general_bindings import PANELS, SCREENS
from cockpit.tui.navigation import Navigator
from cockpit.tui.screens.run_screen import RunScreen
from cockpit.tui.screens.screens import PANEL_NAMES
from cockpit.tui.widgets.panel import Panel

NOT_OFFERED = {"app.palette", "panel.next", "panel.previous", "panel.back", "panel.open"}
MOST_ANOMALIES, MOST_RUNS = 16, 256


class Steered(Protocol):
    """The attributes and methods of the app that the palette uses."""

    ACTIONS: tuple[Action, ...]
    navigator: Navigator
    depth: Depth

    @property
    def shown(self) -> Store: ...

    async def run_action(self, action: str, default_namespace: DOMNode | None = None) -> bool: ...

    def choose_theme(self, name: str) -> None: ...

    def open_knob(self, name: str) -> None: ...

    def open_runs(self, at: Path | None = None) -> None: ...

    async def show_panel(self, screen: str, name: str) -> None: ...


@dataclass(frozen=True)
class Command:
    """An entry of the command palette. `first`: whether the entry is listed before anything is typed."""

    title: str
    about: str
    run: Callable[[], object]
    first: bool = True


def commands(app: Steered, screen: Screen[object]) -> Iterator[Command]:
    """All commands that the palette offers on a screen."""
    yield from (_action(app, one, one.label.capitalize()) for one in _offered(app.ACTIONS))
    yield from (_action(app, one, f"{one.label} screen") for one in SCREENS)
    for name, panels in PANEL_NAMES.items():
        for id, title in panels.items():
            go = partial(app.show_panel, name, id)
            yield Command(f"Panel: {title}", f"Show it on the screen {name}", go, first=False)
    if isinstance(screen, RunScreen):
        for one in _offered(PANELS):
            yield _action(app, one, one.label.capitalize(), where=screen)
        for panel in screen.query(Panel):
            if panel.is_on_screen:
                yield from (
                    _action(app, one, f"{panel.TITLE}: {one.label}", where=panel)
                    for one in panel.ACTIONS
                    if one.footer
                )
    for name in offered(app.depth):
        about = f"Use this theme: {HUES[name].about}"
        yield Command(f"Theme: {name}", about, partial(app.choose_theme, name), first=False)
    yield from _of_the_run(app)


def _offered(actions: tuple[Action, ...]) -> Iterator[Action]:
    return (action for action in actions if action.id not in NOT_OFFERED)


def _action(app: Steered, action: Action, title: str, where: DOMNode | None = None) -> Command:
    def run() -> Awaitable[bool]:
        return app.run_action(action.action, where)

    return Command(title, f"{action.about}  ({spelled(action.keys)})", run)


def _of_the_run(app: Steered) -> Iterator[Command]:
    """Commands for the run's metrics, knobs, marks and anomalies. A run may have many of these commands, so the palette
    lists only those that match the typed text."""
    store, navigator = app.shown, app.navigator
    selection = navigator.session.selection

    def show_metric(key: str) -> None:
        selection.metric = key
        navigator.go(Jump(screen="ranks"))

    with store.lock:
        if not store.state.hellos:
            return
        for metric in available(store):
            unit = f" in {metric.unit}" if metric.unit else ""
            about = f"Show {metric.title}{unit} of each rank"
            yield Command(f"Metric: {metric.title}", about, partial(show_metric, metric.key), first=False)
        if any(action.id == "app.knobs" for action in app.ACTIONS):
            for knob in store.state.board.knobs if store.state.board else ():
                value = "" if knob.action else f" = {format.knob(knob.value)}"
                yield Command(
                    f"Knob: {knob.name}{value}", knob.about, partial(app.open_knob, knob.name), first=False
                )
        for mark in store.named_marks:
            title = f"Mark {mark.text}"
            yield Command(
                title, f"Go to step {mark.step}", partial(navigator.go, Jump(step=mark.step)), first=False
            )
        found = anomalies(store, selection.metric, matching(store, selection.filter, selection.step))
        for one in found[:MOST_ANOMALIES]:
            to = Jump(one.step, one.rank, one.layer, one.expert, one.screen)
            yield Command(
                f"Anomaly: {one.text}", "Show it on its screen", partial(navigator.go, to), first=False
            )


class CommandProvider(Provider):
    """Supplies Textual's command palette with the result of `commands` and with the runs in the runs folder. The folder
    is read when the palette is opened."""

    _runs: Sequence[Path] = ()

    async def startup(self) -> None:
        self._runs = await asyncio.to_thread(
            lambda: [run.folder for run in list_runs(runs_dir())[:MOST_RUNS]]
        )

    def _all(self) -> Iterator[Command]:
        app: Steered = self.app  # type: ignore[assignment]
        yield from commands(app, self.screen)
        for folder in self._runs:
            about = "Show it in the list of runs: enter opens it, space marks it for a comparison"
            yield Command(f"Run: {folder.name}", about, partial(app.open_runs, folder), first=False)

    async def discover(self) -> Hits:
        for one in self._all():
            if one.first:
                title = format.clean(one.title)
                yield DiscoveryHit(Text(title), one.run, title, escape(format.clean(one.about)))

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for one in self._all():
            title = format.clean(one.title)
            score, places = matcher.fuzzy_search.match(query, title)
            if score > 0:
                shown = Text(title)
                for place in places:
                    shown.stylize("reverse", place, place + 1)
                yield Hit(score, shown, one.run, title, escape(format.clean(one.about)))
