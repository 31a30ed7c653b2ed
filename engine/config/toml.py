"""A layout as TOML, every key spelled out: what the run's folder keeps of what was asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agents.rundir.hub_supervisor import say
from engine.config.layout import Layout

LAYOUT_FILE = "layout.toml"  # in the run's folder


def to_toml(layout: Layout) -> str:
    """The text that `from_toml` reads the same layout from. What is None is left out: absent means that."""
    return "\n\n".join("\n".join(lines) for lines in _sections("", msgspec.to_builtins(layout))) + "\n"


def keep(layout: Layout, folder: Path) -> None:
    """Write the layout of the run's newest start to ``layout.toml`` in its folder; where that cannot be, say so."""
    path, unfinished = folder / LAYOUT_FILE, folder / f".{LAYOUT_FILE}"
    try:
        unfinished.write_text(
            f"# The layout that this run was started with, overrides included.\n\n{to_toml(layout)}", "utf-8"
        )
        unfinished.replace(path)
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}; the run goes on without it\n")


def _sections(name: str, tree: dict[str, Any]) -> Iterator[list[str]]:
    values = [f"{key} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict | None)]
    if values:
        yield [f"[{name}]", *values]
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _sections(f"{name}.{key}" if name else key, value)


def _value(value: str | float | bool) -> str:
    """JSON's spelling is TOML's, but for one character that TOML wants escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
