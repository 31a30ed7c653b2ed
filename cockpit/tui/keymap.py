"""The user's keys: ``keys.toml`` in the configuration directory, by the id of an action, e.g. ``"app.knobs" = "b"``.

A file with an unknown id, an unknown key, or two actions on one key in one place is refused with one sentence.
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
from cockpit.tui.keys import ALL, BY_ID, NOT_IN_REPLAY, Action, spelled

RENAMED = {"app.save": "app.screenshot"}  # ids of earlier releases
EVERYWHERE = ("screen", "app", "panel")  # beginnings of ids of actions that work on all screens
DIALOGS = ("board", "ending", "prompt")  # a dialog has its own keys only
_MODIFIED = re.compile(r"(?P<modifiers>(?:(?:ctrl|shift|alt|super|meta|hyper)\+)*)(?P<key>.+)")
_NAMES = {key.value for key in Keys} | set(KEY_ALIASES)


class KeymapError(ValueError):
    """The keymap file is invalid; the message is one sentence."""


def load_keymap(path: Path | None = None) -> dict[str, str]:
    """The user's keys by action id; empty without a file. Raises KeymapError for an invalid file."""
    try:
        path = path or platformdirs.user_config_path("cockpit") / "keys.toml"
    except RuntimeError:  # a user without a home directory has no keymap
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
    """The name of a key in Textual: ``question_mark`` for ``?``."""
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
    """The actions whose keys work at the same time, by place: each panel in a live run and in a replay, each dialog."""
    groups: dict[str, list[Action]] = {}
    for action in ALL:
        groups.setdefault(action.id.partition(".")[0], []).append(action)
    everywhere = [action for name in EVERYWHERE for action in groups[name]]
    found = {name: tuple(groups[name]) for name in DIALOGS}
    for name, own in groups.items():
        if name not in (*EVERYWHERE, *DIALOGS, "replay"):
            found[name] = (*everywhere, *own)
            recorded = (action for action in everywhere if action.id not in NOT_IN_REPLAY)
            found[f"{name} in a replay"] = (*recorded, *groups["replay"], *own)
    return found


class Conflict(NamedTuple):
    """Two actions on one key in one place."""

    key: str
    first: str
    second: str
    place: str

    @property
    def text(self) -> str:
        """One sentence."""
        one, other = (f"{id} ({BY_ID[id].label})" for id in (self.first, self.second))
        place = f"{spelled(self.key)} would be both {one} and {other} in {self.place}"
        return f"the key {place}; give one of them another key"


def conflicts(keymap: Mapping[str, str]) -> Iterator[Conflict]:
    """The keys that would have two actions in one place. By default, some panels have actions of their own on enter
    and escape, which come before those of the screen."""
    for place, actions in places().items():
        taken: dict[str, Action] = {}
        for action in actions:
            for key in keymap.get(action.id, action.keys).split(","):
                other = taken.setdefault(key, action)
                if other is not action:
                    yield Conflict(key, other.id, action.id, place)
