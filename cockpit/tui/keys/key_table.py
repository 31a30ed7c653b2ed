"""Prints docs/operate/keys.md, a list of all keys. To update this page, run ``python -m cockpit.tui.keys.key_table >
docs/operate/keys.md``."""

from collections.abc import Iterator

from cockpit.printing import print_line
from cockpit.tui.keys.action import Action, spelled
from cockpit.tui.keys.all_bindings import ALL
from cockpit.tui.keys.user_keymap import RENAMED

TITLES = {
    "screen": "Screens",
    "app": "On all screens",
    "panel": "Panels",
    "ranks": "Rank grid",
    "list": "Lists",
    "board": "Knob board",
    "ending": "Before a run is ended",
    "replay": "In a replay",
    "prompt": "At the prompt",
}
"""Headings by the first part of the ids. Ids with another first part are listed under that part, such as `Curves`."""

HEAD = """# Keys

This page lists all keys of the cockpit, with the id of each action. `?` lists the keys of the focused panel. The mouse
works too: a click selects and focuses, a double click acts like Enter, and the wheel acts like the up and down arrows.

To choose other keys, write them by id into `keys.toml` in the configuration directory (`~/.config/cockpit` on Linux):

```toml
"app.knobs" = "f2"
"ranks.metric" = "m,f3"
```

A file with an unknown id, an unknown key, or two actions on one key in one place is refused with a one-line error.
{renamed}.

`t` and the palette save the selected theme in `settings.toml` in the same directory, as `theme = "cockpit-light"`.
"""


def table() -> str:
    """The page docs/operate/keys.md, as Markdown."""
    renamed = "; ".join(
        f"The id `{old}` of earlier releases is accepted for `{new}`" for old, new in RENAMED.items()
    )
    return HEAD.format(renamed=renamed) + "".join(_section(title, actions) for title, actions in _groups())


def _groups() -> Iterator[tuple[str, list[Action]]]:
    groups: dict[str, list[Action]] = {}
    for action in ALL:
        groups.setdefault(action.id.partition(".")[0], []).append(action)
    for name, actions in groups.items():
        yield TITLES.get(name, name.capitalize()), actions


def _section(title: str, actions: list[Action]) -> str:
    rows = "".join(f"| {_keys(one)} | {one.about} | `{one.id}` |\n" for one in actions)
    return f"\n## {title}\n\n| keys | what it does | id |\n|---|---|---|\n{rows}"


def _keys(action: Action) -> str:
    return " ".join(f"`{key}`" for key in spelled(action.keys).split(" "))


if __name__ == "__main__":
    for line in table().splitlines():
        print_line(line)
