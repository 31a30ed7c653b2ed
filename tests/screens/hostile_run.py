"""A scripted run with hostile names: markup, escape sequences, and Unicode characters that reverse the text
direction."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct, structs

from agents.protocol import Alert, CommandState, Event, Gone, Pulse, Update
from tests.screens.fake_run import FakeRun

TURN = "\u202e"  # reverses the direction of the following text
HOSTILE = {
    "demo": "demo[/x]",
    "dp": "dp[/x]",
    "tp": "t[b]p",
    "forward": "fwd[/x]",
    "backward": "attn[qkv]",
    "node0": f"[link=x]{TURN}n",
    "cpu": "\x1b[2Jcpu",
    "1f1b": "1f[/]1b",
    "lr_scale": "[@click=app.quit]lr",
    "selective": f"[/sel]{TURN}",
    "ada@login": "ada[/]\x1b]0;x\x07",
}


def hostile(value: Any) -> Any:
    """A copy of an update in which names are replaced by hostile ones."""
    if isinstance(value, str):
        return HOSTILE.get(value, value)
    if isinstance(value, Struct):
        fields = {field.name: hostile(getattr(value, field.name)) for field in structs.fields(value)}
        return type(value)(**fields)
    if isinstance(value, dict):
        return {hostile(name): hostile(item) for name, item in value.items()}
    return [hostile(item) for item in value] if isinstance(value, list) else value


class HostileRun(FakeRun):
    def story(self, steps: int, change_at: int | None = None) -> Iterator[Update]:
        for update in (*super().story(steps, change_at), *self.happenings()):
            yield hostile(update)

    def happenings(self) -> Iterable[Update]:
        text = f"[/x] \x1b[31mred\x1b[0m {TURN}reverse\nsecond line"
        yield Event(1.7e9, "error", "[/hub]", text)
        yield Alert("[/n]", "[/s]", "warning", True, 150, 1.7e9, text, ranks=[3])
        yield CommandState("c9", 0, "rejected", {"recompute": "selective"}, {}, "ada@login", 2.0, why=text)
        yield CommandState("c8", 2, "applied", {"[/k]": "[/v]"}, {}, "[/]", 2.0, 8, 8, 150, why=text)
        yield self.trial("t", "after", 16, measured=12, who="[/]", why=text)
        yield Pulse(2, 159, text, 12.0)
        yield Gone(5, clean=False, text=text)
