"""Open the screen for the commands `attach` and `replay`. Errors are reported before Textual takes control of the
terminal."""

import os
import sys
from typing import TYPE_CHECKING

from cockpit.data.run_folders.final_summary import has_ended
from cockpit.data.run_folders.next_run import NextRun
from cockpit.data.sources.connection import CockpitError, address, target
from cockpit.data.sources.folders import run_folder
from cockpit.data.sources.recorded import find_position, folder_of, open_recording
from cockpit.data.store import Store
from cockpit.printing import complain, print_final_summary

if TYPE_CHECKING:
    from cockpit.tui.app import CockpitApp


def need_terminal() -> None:
    """Raise CockpitError if there is no terminal. In a browser, no terminal is needed."""
    if "TEXTUAL_DRIVER" in os.environ:  # set by textual-serve
        return
    # Textual reads keys from standard input, and draws on standard error.
    for name, stream in (("standard input", sys.__stdin__), ("standard error", sys.__stderr__)):
        if stream is None or not stream.isatty():
            raise CockpitError(
                f"the screen needs a terminal, but {name} is not one; cockpit status, watch and snapshot need none"
            )


def keymap() -> dict[str, str]:
    from cockpit.tui.keys.user_keymap import KeymapError, load_keymap

    try:
        return load_keymap()
    except KeymapError as error:
        raise CockpitError(str(error)) from None


def theme() -> str:
    """The name of the theme in the user's settings."""
    from cockpit.tui.settings import SettingsError, load_settings

    try:
        return load_settings().theme
    except SettingsError as error:
        raise CockpitError(str(error)) from None


def report_fault(store: Store) -> bool:
    """If an internal error has stopped the cockpit's updates, print the error's traceback and how to continue. Return
    whether an internal error occurred."""
    if store.fault is None:
        return False
    for line in store.fault.trace.splitlines():
        complain(line)
    complain(f"an internal error detached this cockpit; {store.fault.how_to_continue}")
    return True


def attach(run: str | None, operator: bool, low_bandwidth: bool = False) -> int:
    """Open the screen on a live run."""
    hub = address(run, operator)  # called first, so that its errors are raised before Textual is imported
    need_terminal()
    from cockpit.data.sources.live import LiveSource
    from cockpit.tui.app import CockpitApp

    source = LiveSource(hub.endpoint, operator, target(run), hub.key, low_bandwidth)
    app = CockpitApp(source, keymap=keymap(), theme=theme(), folder=run_folder(run))
    return show(app, operator, low_bandwidth)


def replay(run: str | None, at: str | None, speed: float) -> int:
    """Open the screen on a recorded run."""
    # called first, so that its errors are raised before Textual takes the screen
    recording = open_recording(run)
    begin = find_position(recording, at) if at is not None else None
    need_terminal()
    from cockpit.data.sources.playback import Playback
    from cockpit.tui.replay import ReplayApp

    folder = folder_of(run)
    playback = Playback(recording, folder.name, speed, begin)
    return show(ReplayApp(playback, keymap=keymap(), theme=theme(), folder=folder))


def show(app: "CockpitApp", operator: bool = False, low_bandwidth: bool = False) -> int:
    """Show a run, then each run that the user opens from the screen. Returns the exit status of the cockpit.

    `operator`, `low_bandwidth`: options for attaching to live runs.
    """
    from cockpit.tui.settings import save_theme

    while True:
        app.attaches_as_operator = operator
        app.remember_theme = save_theme
        app.run()
        if report_fault(app.store):
            return 1
        with app.store.lock:
            over = has_ended(app.store) and not app.session.recorded
        if over:
            print_final_summary(app.store)
        if app.next_run is None:
            return app.return_code or 0
        app = _app_of(app.next_run, operator, low_bandwidth, app.theme)


def open_next(app: "CockpitApp") -> int:
    """Open the run that the user chose before the app closed, if there is one. Returns an exit status."""
    return 0 if app.next_run is None else show(_app_of(app.next_run, False, False, app.theme))


def _app_of(following: NextRun, operator: bool, low_bandwidth: bool, theme: str) -> "CockpitApp":
    """The app that shows a run chosen from the list of runs."""
    from cockpit.data.sources.live import LiveSource
    from cockpit.data.sources.playback import Playback
    from cockpit.tui.app import CockpitApp
    from cockpit.tui.replay import ReplayApp

    folder = following.folder
    if following.live:
        hub = address(str(folder.absolute()), operator)
        source = LiveSource(hub.endpoint, operator, str(folder), hub.key, low_bandwidth)
        return CockpitApp(source, keymap=keymap(), theme=theme, folder=folder)
    recording = open_recording(str(folder.absolute()))
    return ReplayApp(Playback(recording, folder.name), keymap=keymap(), theme=theme, folder=folder)
