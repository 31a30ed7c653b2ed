"""`engine reference`: prints every key of a layout as Markdown, generated from the schema (docs/train/layout.md)."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct

from engine.cli.printing import print_text
from engine.cli.usage import refuse
from engine.config.layout import Layout
from engine.config.types import keys, legal, section_in

HEAD = """# Layout: every key

<!-- Generated from the schema by `engine reference > docs/train/layout.md`; a test compares the two. -->

A layout is a TOML file that describes a run. `section.key=value` on the command line overrides a key; the value `none`
removes it. If a value or a combination of values is illegal, `engine run` prints a one-sentence error and starts no
rank. Example layouts are in `layouts/`. The run's folder holds the complete layout, overrides included, as
`layout.toml`.
"""


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    about = "print every key of a layout and its legal values as Markdown"
    commands.add_parser("reference", help=about, description=about)


def main(options: argparse.Namespace, rest: Sequence[str]) -> None:
    if rest:
        refuse(f"engine reference takes no argument {rest[0]}")
    print_text(reference())


def reference() -> str:
    return "\n".join([HEAD, *_sections(Layout, "")])


def _sections(kind: type[Struct], name: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    inner = {key: section_in(hint) for key, (hint, _) in keys(kind).items()}
    if name:
        about = " ".join((kind.__doc__ or "").split())
        yield f"## [{name}]\n\n{about}\n\n| key | legal | absent | meaning |\n|---|---|---|---|"
        for key, (hint, meaning) in keys(kind).items():
            if not inner[key]:
                admitted = legal(hint).replace("|", "\\|")
                yield f"| `{key}` | {admitted} | {_absent(fields[key])} | {meaning} |"
        yield ""
    for key, section in inner.items():
        if section:
            yield from _sections(section, f"{name}.{key}" if name else key)


def _absent(field: Any) -> str:
    """The text that the table shows for the default value of a key."""
    if field.default is NODEFAULT:
        return "required"
    if field.default is None:
        return "none"
    return f"`{msgspec.json.encode(field.default).decode()}`"
