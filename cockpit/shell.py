"""What every command with a screen needs before it opens one."""

from cockpit.connect import CockpitError, address, target
from cockpit.recorded import folder_of, open_recording, place


def keymap() -> dict[str, str]:
    from cockpit.actions import KeymapError, load_keymap

    try:
        return load_keymap()
    except KeymapError as error:
        raise CockpitError(str(error)) from None


def attach(run: str | None, operator: bool, low_bandwidth: bool = False) -> int:
    """Open the screen on a live run."""
    hub = address(
        run, operator
    )  # says what is wrong before the screen is taken, and before Textual is loaded
    from cockpit.app import CockpitApp
    from cockpit.live import LiveFeed

    feed = LiveFeed(hub.endpoint, operator, target(run), hub.key, low_bandwidth)
    app = CockpitApp(feed, keymap=keymap())
    app.run()
    return app.return_code or 0


def replay(run: str | None, at: str | None, speed: float) -> int:
    """Open the screen on a recorded run."""
    recording = open_recording(run)  # says what is wrong before the screen is taken
    begin = place(recording, at) if at is not None else None
    from cockpit.playback import Playback
    from cockpit.replaying import ReplayApp

    app = ReplayApp(Playback(recording, folder_of(run).name, speed, begin), keymap=keymap())
    app.run()
    return app.return_code or 0
