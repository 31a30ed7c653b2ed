"""Limits on what a tool returns. Text from runs is untrusted, so control characters become spaces. A long string is
truncated and ends with `…`. If a result is too large, its largest lists are truncated, or its largest values become
null; its field `cut` names them.
"""

from typing import Any

import msgspec

from cockpit.data import plain
from cockpit.data.format import clean

MOST_BYTES = 32 << 10  # maximum size of an answer as compact JSON
MOST_TEXT = 2000  # maximum length of one text, in characters


def bounded(record: dict[str, Any]) -> dict[str, Any]:
    """Convert `record` to JSON values of at most `MOST_BYTES` in total, by truncating its largest lists. Non-finite
    numbers become null."""
    found: dict[str, Any] = _clean(msgspec.json.decode(plain.to_json(record)))
    lengths: dict[str, int] = {}
    while _size(found | _cut(found, lengths)) > MOST_BYTES:
        path, longest = max(_lists(found, ""), key=lambda one: _size(one[1]), default=("", []))
        if len(longest) < 2:
            largest = max(found, key=lambda name: _size(found[name]))
            found[largest] = None
            lengths[largest] = 0
            continue
        lengths.setdefault(path, len(longest))
        del longest[len(longest) // 2 :]
    return found | _cut(found, lengths)


def _cut(found: dict[str, Any], lengths: dict[str, int]) -> dict[str, list[str]]:
    """The field `cut`, if lists of `found` were truncated. `lengths`: the lists' original lengths, by path; 0 for a
    value that was removed because it is too large."""
    kept = {path: len(items) for path, items in _lists(found, "")} if lengths else {}
    texts = [
        f"{path}: the first {kept[path]} of {before} entries" if before else f"{path}: too large"
        for path, before in lengths.items()
        if path in kept or not before  # a truncated list may be inside a value that was then removed
    ]
    return {"cut": texts} if texts else {}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value) if len(value) <= MOST_TEXT else f"{clean(value[: MOST_TEXT - 1])}…"
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return value


def _lists(value: Any, path: str) -> "list[tuple[str, list[Any]]]":
    """The lists under `value` that are not inside another list, with their paths."""
    if isinstance(value, list):
        return [(path, value)]
    if isinstance(value, dict):
        return [one for key, item in value.items() for one in _lists(item, f"{path}.{key}".lstrip("."))]
    return []


def _size(value: Any) -> int:
    return len(msgspec.json.encode(value))
