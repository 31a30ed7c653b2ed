"""The user's settings: ``settings.toml`` in the configuration directory, e.g. ``theme = "cockpit-light"``."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from cockpit.data.format import clean
from cockpit.tui.drawing.theme import DARK, THEMES


class SettingsError(ValueError):
    """The settings file is invalid; the message is one sentence."""


@dataclass(frozen=True)
class Settings:
    """What a user may choose for every run."""

    theme: str = DARK.name


def load_settings(path: Path | None = None) -> Settings:
    """The user's settings; the defaults without a file. Raises SettingsError for an invalid file."""
    try:
        path = path or platformdirs.user_config_path("cockpit") / "settings.toml"
    except RuntimeError:  # a user without a home directory has no settings
        return Settings()
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return Settings()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    for name in given:
        if name != "theme":
            raise SettingsError(f"{path}: {clean(name)} is no setting; legal: theme")
    theme = given.get("theme", DARK.name)
    if theme not in THEMES:
        raise SettingsError(
            f"{path}: theme must be one of {', '.join(THEMES)}, not {clean(str(theme))[:40]!r}"
        )
    return Settings(theme)
