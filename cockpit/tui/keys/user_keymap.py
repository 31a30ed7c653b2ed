"""The user's key bindings, from ``keys.toml`` in the configuration directory. The lines of the file bind action ids to
keys, such as ``"app.knobs" = "b"``.

A file is rejected with a one-sentence error if it contains an unknown id or an unknown key, or binds one key to two
actions that can be used at the same time.
"""

import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import platformdirs
from textual.keys import KEY_ALIASES, Keys
from textual.keys import _character_to_key as character_to_key

from cockpit.data import format
from cockpit.tui.keys.action import Action, spelled
from cockpit.tui.keys.all_bindings import BY_ID
from cockpit.tui.keys.dialog_bindings import ENDING
from cockpit.tui.keys.general_bindings import APP, NOT_IN_REPLAY, PANELS, PROMPT, REPLAY, SCREENS

RENAMED = {"app.save": "app.screenshot"}  # ids of earlier releases
DIALOGS = ("board", "info", "runs")  # id prefixes of panels in dialogs, which have only their own keys
_MODIFIED = re.compile(r"(?P<modifiers>(?:(?:ctrl|shift|alt|super|meta|hyper)\+)*)(?P<key>.+)")
_NAMES = {key.value for key in Keys} | set(KEY_ALIASES)


class KeymapError(ValueError):
    """The keymap file is invalid; the message is one sentence."""


def load_keymap(path: Path | None = None) -> dict[str, str]:
    """The user's keys by action id; empty if there is no file. Raises KeymapError if the file is invalid."""
    try:
        path = path or platformdirs.user_config_path("cockpit") / "keys.toml"
    except RuntimeError:  # without a home directory there is no keymap
        return {}
    try:
        given = tomllib.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise KeymapError(f"{path} cannot be read: {error}") from None
    keymap = {}
    for name, keys in given.items():
        id = RENAMED.get(name, name)
        if id not in BY_ID or not isinstance(keys, str):
            legal = ", ".join(sorted(BY_ID))
            raise KeymapError(
                f'{path}: {format.clean(name)} must be one of {legal}, with keys such as "x" or "f2,x"'
            )
        keymap[id] = ",".join(_key(path, id, one.strip()) for one in keys.split(","))
    shadowed = set(conflicts({}))
    for one in conflicts(keymap):
        if one not in shadowed:
            raise KeymapError(f"{path}: {one.text}")
    return keymap


def _key(path: Path, id: str, text: str) -> str:
    """The name that Textual uses for a key, such as ``question_mark`` for ``?``."""
    found = _MODIFIED.fullmatch(text)
    key = found["key"] if found else ""
    if found and len(key) == 1 and key.isprintable() and key != " ":
        return found["modifiers"] + (character_to_key(key) if not key.isalnum() else key)
    if found and (key in _NAMES or _is_character(key)):
        return text
    shown = format.clean(text)[:24]
    raise KeymapError(f"{path}: {id} has no key {shown!r}; legal: x, ?, f2, enter, ctrl+x, comma and so on")


def _is_character(name: str) -> bool:
    try:
        unicodedata.lookup(name.replace("_", " ").upper())
    except KeyError:
        return False
    return True


def places() -> dict[str, tuple[Action, ...]]:
    """Lists of actions whose keys are active at the same time: one for each panel in a live run, each panel in a
    replay, and each dialog."""
    everywhere = (*SCREENS, *APP, *PANELS)
    recorded = (*(action for action in everywhere if action.id not in NOT_IN_REPLAY), *REPLAY)
    found: dict[str, tuple[Action, ...]] = {"ending": ENDING, "prompt": PROMPT}
    for own in _of_panels():
        name = own[0].id.partition(".")[0]
        if name in DIALOGS:
            found[name] = own
        else:
            found[name] = (*everywhere, *own)
            found[f"{name} in a replay"] = (*recorded, *own)
    return found


def _of_panels() -> Iterator[tuple[Action, ...]]:
    """The actions of each panel class."""
    from cockpit.tui.screens.screens import RUN_SCREENS
    from cockpit.tui.widgets.panel import Panel

    list(RUN_SCREENS.values())  # each lookup imports a screen, and with it the classes of its panels
    classes = [Panel]
    for one in classes:
        classes += one.__subclasses__()
    return (one.ACTIONS for one in classes if one.ACTIONS)


class Conflict(NamedTuple):
    """Two actions that are bound to the same key and can be used at the same time (see `places`)."""

    key: str
    first: str
    second: str
    place: str

    @property
    def text(self) -> str:
        """The conflict in one sentence, as an error message."""
        one, other = (f"{id} ({BY_ID[id].label})" for id in (self.first, self.second))
        place = f"{spelled(self.key)} would be both {one} and {other} in {self.place}"
        return f"the key {place}; give one of them another key"


def conflicts(keymap: Mapping[str, str]) -> Iterator[Conflict]:
    """The keys that are bound to two actions of the same list in `places`. Overlaps of the default keys are allowed:
    some panels bind keys such as Enter to actions of their own, which take precedence over the screen's actions.
    """
    for place, actions in sorted(places().items()):
        taken: dict[str, Action] = {}
        for action in actions:
            for key in keymap.get(action.id, action.keys).split(","):
                other = taken.setdefault(key, action)
                if other is not action:
                    yield Conflict(key, other.id, action.id, place)
