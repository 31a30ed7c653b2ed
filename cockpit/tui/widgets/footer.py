"""The footer: the keys of the current screen, or the most important ones if not all fit."""

from collections.abc import Collection

from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from cockpit.tui.keys.all_keys import BY_ID


class FittedFooter(Footer):
    """Textual's footer, reduced to the keys that fit. `without`: ids of actions to omit."""

    def __init__(self, without: Collection[str] = ()) -> None:
        super().__init__(show_command_palette=False)
        self._without = without

    def compose(self) -> ComposeResult:
        ids = {
            active.binding.action: active.binding.id or "" for active in self.screen.active_bindings.values()
        }
        keys = [
            key
            for key in super().compose()
            if isinstance(key, FooterKey) and ids.get(key.action) not in self._without
        ]
        while len(keys) > 1 and sum(map(_width, keys)) > self.app.size.width:
            keys.remove(max(keys, key=lambda key: _importance(ids.get(key.action, ""))))
        yield from keys

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.recompose)


def _width(key: FooterKey) -> int:
    """Width of a key in cells, as drawn: `` k knobs ``."""
    return cell_len(key.key_display) + cell_len(key.description) + 3


def _importance(id: str) -> int:
    """The priority of an action in the footer, lowest number first; Textual's own actions come last."""
    return BY_ID[id].footer if id in BY_ID else 99
