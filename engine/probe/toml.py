"""Writes a hardware description as TOML, which `engine plan --hardware FILE` reads."""

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.planner.hardware.description import Hardware

RESULT = "probe.json"  # file with rank 0's measurements, in a temporary folder
HEAD = """\
# A hardware description: seconds, bytes, bytes/s, FLOP/s. Written by engine probe.
"""


def to_toml(hardware: Hardware) -> str:
    """The description as TOML, which `engine.planner.hardware.table.load` reads back unchanged. Keys with the value
    None are left out."""
    tree = msgspec.to_builtins(hardware)
    return HEAD + "\n" + "\n".join(_lines("", tree)) + "\n"


def _lines(name: str, tree: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in tree.items() if value is not None and not _is_section(value)}
    yield from (f"{key} = {_value(value)}" for key, value in plain.items())
    for key, value in tree.items():
        path = f"{name}.{key}" if name else key
        if isinstance(value, dict):
            yield from ("", f"[{path}]")
            yield from _lines(path, value)
        elif _is_section(value):
            for one in value:
                yield from ("", f"[[{path}]]")
                yield from _lines(path, one)


def _is_section(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
    )


def _value(value: Any) -> str:
    """A value in JSON syntax, which is also valid TOML for strings and numbers if DEL is escaped."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
