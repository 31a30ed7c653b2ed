"""``cockpit schema``: prints the JSON Schema of a `--json` output.

The JSON files in this folder contain the schemas by output name, under `outputs`, and the shared definitions, under
`$defs`. Later releases keep the required fields of each output and their types, and may add fields.
"""

import re
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from cockpit.cli.exit_status import DONE
from cockpit.data.sources.connection import CockpitError
from cockpit.printing import print_line, print_table

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = re.compile(r'"#/\$defs/(\w+)"')


@cache
def _contents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The schemas of all `--json` outputs, and all shared definitions, each by name."""
    outputs: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for file in files(__package__).iterdir():
        if file.name.endswith(".json"):
            found = msgspec.json.decode(file.read_bytes())
            outputs |= found.get("outputs", {})
            shared |= found["$defs"]
    return outputs, shared


def names() -> list[str]:
    """The names of all `--json` outputs that have a schema."""
    return sorted(_contents()[0])


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of the `--json` output `name`, with the definitions that it uses. Raises CockpitError if no
    output has this name."""
    outputs, shared = _contents()
    if name not in outputs:
        raise CockpitError(f"there is no output {name[:60]}; the outputs are {', '.join(names())}")
    used: dict[str, Any] = {}
    new = _referenced(outputs[name])
    while new:
        used |= {one: shared[one] for one in new}
        new = {found for one in new for found in _referenced(shared[one])} - {*used}
    found: dict[str, Any] = outputs[name]
    return {"$schema": DIALECT, "title": name, **found, "$defs": dict(sorted(used.items()))}


def _referenced(part: dict[str, Any]) -> set[str]:
    return set(_REFERENCE.findall(msgspec.json.encode(part).decode()))


def print_schema(name: str | None) -> int:
    """Print a schema, or the names of all schemas."""
    if name is None:
        print_table([["name", "output"], *([one, _contents()[0][one]["description"]] for one in names())])
        return DONE
    for line in msgspec.json.format(msgspec.json.encode(schema(name)), indent=2).decode().splitlines():
        print_line(line)
    return DONE
