"""Open the screen for the commands `attach` and `replay`; errors are reported before Textual takes the terminal."""

from cockpit.data.sources.connection import CockpitError, address, target
from cockpit.data.sources.folders import run_folder
from cockpit.data.sources.recorded import find_position, folder_of, open_recording
from cockpit.data.store import Store
from cockpit.printing import complain


def keymap() -> dict[str, str]:
    from cockpit.tui.keymap import KeymapError, load_keymap

    try:
        return load_keymap()
    except KeymapError as error:
        raise CockpitError(str(error)) from None


def theme() -> str:
    """The theme of the user's settings."""
    from cockpit.tui.settings import SettingsError, load_settings

    try:
        return load_settings().theme
    except SettingsError as error:
        raise CockpitError(str(error)) from None


def report_fault(store: Store) -> bool:
    """If an internal error stopped the updates, print its traceback. Return whether there was one."""
    if store.fault is None:
        return False
    for line in store.fault.trace.splitlines():
        complain(line)
    complain(f"an internal error detached this cockpit; {store.fault.how_to_continue}")
    return True


def attach(run: str | None, operator: bool, low_bandwidth: bool = False) -> int:
    """Open the screen on a live run."""
    hub = address(run, operator)  # called first, so that its errors are raised before Textual is imported
    from cockpit.data.sources.live import LiveSource
    from cockpit.tui.app import CockpitApp

    source = LiveSource(hub.endpoint, operator, target(run), hub.key, low_bandwidth)
    app = CockpitApp(source, keymap=keymap(), theme=theme(), folder=run_folder(run))
    app.run()
    return 1 if report_fault(app.store) else app.return_code or 0


def replay(run: str | None, at: str | None, speed: float) -> int:
    """Open the screen on a recorded run."""
    # called first, so that its errors are raised before Textual takes the screen
    recording = open_recording(run)
    begin = find_position(recording, at) if at is not None else None
    from cockpit.data.sources.playback import Playback
    from cockpit.tui.replay import ReplayApp

    app = ReplayApp(
        Playback(recording, folder_of(run).name, speed, begin),
        keymap=keymap(),
        theme=theme(),
        folder=folder_of(run),
    )
    app.run()
    return 1 if report_fault(app.store) else app.return_code or 0
