"""Reads layouts from TOML, applies command-line overrides, and writes layouts as TOML."""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agents.rundir.bounded_read import read_ordinary
from agents.rundir.hub_supervisor import say
from agents.transport.open_files import replace_file
from engine.config.checks.layout_checks import refusals
from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.config.types import choices, keys, legal, section_in
from engine.layouts import LAYOUTS, find, names

LAYOUT_FILE = "layout.toml"  # name of the file in the run's folder
MOST_BYTES = 2**20  # maximum size of a layout file
RENAMED = {"snapshot": "checkpoint"}  # section names of earlier releases


def load(path: str | Path, overrides: list[str] | None = None) -> Layout:
    """Read a layout from a file or, by name (such as `demo`), a layout that comes with the package, and apply
    ``section.key=value`` overrides. Raises LayoutError."""
    return from_toml(read_text(shipped(path, "layout", LAYOUTS), "layout"), overrides or [], str(path))


def shipped(path: str | Path, what: str, folders: Sequence[str]) -> str | Path:
    """The file at `path` or, if `path` is the name of a file that comes with the package in one of `folders`, that
    file. `what` ("layout" or "scenario") is for the error message. Raises LayoutError."""
    found = find(path, folders)
    if found is None and str(path).isprintable() and not any(mark in str(path) for mark in "./ "):
        raise LayoutError(
            f"there is no {what} {shown(str(path))}; legal: a TOML file, or {', '.join(names(folders))}"
        )
    return found or path


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that the user named. `what`: the kind of file, for error messages, such as "layout". Raises
    LayoutError."""
    try:
        return read_ordinary(Path(path), MOST_BYTES).decode()
    except OSError as error:
        raise LayoutError(f"cannot read the {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LayoutError(f"the {what} {path} is not UTF-8 text") from None


def from_toml(text: str, overrides: list[str] | None = None, where: str = "layout") -> Layout:
    """Parse and check a layout. Error messages refer to the text by the name `where`, such as its file's path. Raises
    LayoutError."""
    tree = parse(text, where)
    for override in overrides or []:
        _apply_override(tree, override)
    layout: Layout = read_struct(Layout, tree, "")
    return check_layout(layout)


def parse(text: str, where: str) -> dict[str, Any]:
    """The content of the TOML document `text`. Error messages refer to the document by the name `where`. Raises
    LayoutError."""
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # Python raises these errors also for numbers and nesting beyond its limits
        raise LayoutError(f"{where} is not TOML: {_parse_error(error)}") from None


def check_layout(layout: Layout) -> Layout:
    """Return the layout if it passes all checks. Raises LayoutError."""
    for refusal in refusals(layout):
        raise LayoutError(refusal)
    return layout


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        raise LayoutError(
            f"{shown(override)} is not an override; write section.key=value, such as train.steps=20"
        )
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise LayoutError(f"{key} is not a key of a layout: {part} is a value and has no keys")
    if text.strip() == "none":
        node.pop(path[-1], None)
        node[path[-1]] = None
    else:
        node[path[-1]] = _literal(text.strip())


def _literal(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _parse_error(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "set_int_max_str_digits" in str(error):
        return "it has a number with thousands of digits"
    return str(error)


def read_struct(kind: Any, tree: Any, at: str, of: str = "a layout") -> Any:
    """Convert `tree` to the Struct `kind`, field by field, so that each error names the key and its legal values. `at`
    (the section) and `of` (the kind of document) are named in error messages."""
    if not isinstance(tree, dict):
        raise LayoutError(f"{at} = {shown(tree)} is not legal; legal: a section [{at}]")
    hints = {key: hint for key, (hint, _) in keys(kind).items()}
    for key in tree:
        if key not in hints:
            close = [RENAMED[key]] if RENAMED.get(key) in hints else difflib.get_close_matches(key, hints, 1)
            hint = f"; did you mean {close[0]}?" if close else f"; legal: {', '.join(hints)}"
            raise LayoutError(f"{_join(at, key)[:200]} is not a key of {of}{hint}")
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        key, hint = field.name, hints[field.name]
        section = section_in(hint)
        if key not in tree:
            if field.required:
                raise LayoutError(f"{_join(at, key)} is missing; legal: {legal(hint)}")
        elif section and tree[key] is not None:
            values[key] = read_struct(section, tree[key], _join(at, key), of)
        else:
            value = "none" if tree[key] is None and "none" in choices(hint) else tree[key]
            try:
                values[key] = msgspec.convert(value, hint)
            except msgspec.ValidationError:
                given = "none" if tree[key] is None else shown(tree[key])
                raise LayoutError(f"{_join(at, key)} = {given} is not legal; legal: {legal(hint)}") from None
    return kind(**values)


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def to_toml(layout: Layout) -> str:
    """The layout as TOML text, which `from_toml` reads back as an equal layout. Keys that are None are omitted."""
    return "\n\n".join("\n".join(lines) for lines in _sections("", msgspec.to_builtins(layout))) + "\n"


def write_layout(layout: Layout, folder: Path) -> None:
    """Write the layout to ``layout.toml`` in the run's folder; if that fails, warn on stderr and continue."""
    text = f"# The layout that this run was started with, overrides included.\n\n{to_toml(layout)}"
    write_copy(folder / LAYOUT_FILE, text)


def write_copy(path: Path, text: str) -> None:
    """Write a file that only documents the run; if that fails, warn on stderr and continue."""
    try:
        replace_file(path, text.encode())
    except OSError as error:
        say(f"cannot write {path}: {error.strerror}; the run continues without it\n")


def _sections(name: str, tree: dict[str, Any]) -> Iterator[list[str]]:
    values = [f"{key} = {_value(value)}" for key, value in tree.items() if not isinstance(value, dict | None)]
    if values:
        yield [f"[{name}]", *values]
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _sections(f"{name}.{key}" if name else key, value)


def _value(value: str | float | bool) -> str:
    """Format a value as JSON with the control character DEL escaped; the result is also valid TOML."""
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
