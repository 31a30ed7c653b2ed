"""Every key of a layout as Markdown, from the schema: `engine reference`, and docs/layout.md."""

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import NODEFAULT, Struct

from engine.config.layout import Layout
from engine.config.types import keys, legal, section_in

HEAD = """# Layout: every key

<!-- Made from the schema by `engine reference > docs/layout.md`; a test holds it to that. -->

A layout is a TOML file: sections of keys. Any key is overridden on the command line as `section.key=value`; `none` is
the absent value. What is wrong, alone or together, is refused in one sentence before anything starts. Shipped layouts
are in `layouts/`; the folder of a run has its own as `layout.toml`, every key spelled out and overrides included.
"""


def reference() -> str:
    return "\n".join([HEAD, *_sections(Layout, "")])


def _sections(kind: type[Struct], name: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    inner = {key: section_in(hint) for key, (hint, _) in keys(kind).items()}
    if name:
        yield f"## [{name}]\n\n{kind.__doc__}\n\n| key | legal | absent | meaning |\n|---|---|---|---|"
        for key, (hint, meaning) in keys(kind).items():
            if not inner[key]:
                admitted = legal(hint).replace("|", "\\|")
                yield f"| `{key}` | {admitted} | {_absent(fields[key])} | {meaning} |"
        yield ""
    for key, section in inner.items():
        if section:
            yield from _sections(section, f"{name}.{key}" if name else key)


def _absent(field: Any) -> str:
    """What a key is that is left out."""
    if field.default is NODEFAULT:
        return "required"
    if field.default is None:
        return "none"
    return f"`{msgspec.json.encode(field.default).decode()}`"
