"""The user's settings, from ``settings.toml`` in the configuration directory, such as ``theme = "cockpit-light"``."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from cockpit.data.format import clean
from cockpit.tui.drawing.themes import DEFAULT, THEMES


class SettingsError(ValueError):
    """The settings file is invalid; the message is one sentence."""


@dataclass(frozen=True)
class Settings:
    """A user's settings, which apply to every run."""

    theme: str = DEFAULT


def settings_path() -> Path:
    """The path of the settings file. Raises RuntimeError if the user has no home directory."""
    return platformdirs.user_config_path("cockpit") / "settings.toml"


def load_settings(path: Path | None = None) -> Settings:
    """The user's settings, or the defaults if there is no file. Raises SettingsError if the file is invalid."""
    try:
        path = path or settings_path()
    except RuntimeError:  # without a home directory there are no settings
        return Settings()
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return Settings()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    for name in given:
        if name != "theme":
            raise SettingsError(f"{path}: {clean(name)} is not a setting; legal: theme")
    theme = given.get("theme", DEFAULT)
    if theme not in THEMES:
        raise SettingsError(
            f"{path}: theme must be one of {', '.join(THEMES)}, not {clean(str(theme))[:40]!r}"
        )
    return Settings(theme)


def save_theme(name: str, path: Path | None = None) -> str:
    """Write the theme into the settings file and keep the rest of the file. Returns a message that says where the theme
    was saved, or why it was not saved."""
    try:
        path = path or settings_path()
        before = path.read_text() if path.exists() else ""
        line = f'theme = "{name}"'
        after, found = re.subn(r"(?m)^theme[ \t]*=.*$", line, before, count=1)
        if not found:
            after = f"{line}\n{before}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(after)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        return f"not remembered: {error}"
    return f"remembered in {path}"
