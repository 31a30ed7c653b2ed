"""Extracts the description and the legal values of a layout key, such as `grid.tp`, as text from the key's type
annotation.

The description is a plain string in the key's `Annotated` type, next to the bounds: ``Annotated[Positive, "tokens"]``.
"""

import types
import typing
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, Struct


def keys(kind: type[Struct]) -> dict[str, tuple[Any, str]]:
    """For each key of a section, the pair of its type (without the description) and its description."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {key: (_without_meaning(hint), _meaning(hint)) for key, hint in hints.items()}


def _without_meaning(hint: Any) -> Any:
    if get_origin(hint) is not Annotated:
        return hint
    base, *metas = (arg for arg in get_args(hint) if not isinstance(arg, str))
    for meta in metas:
        base = Annotated[base, meta]
    return base


def _meaning(hint: Any) -> str:
    words = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((word for word in words if isinstance(word, str)), "")


def section_in(hint: Any) -> Any:
    """The Struct type of a key if the key holds a section, else None."""
    kinds = [hint, *get_args(hint)]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Struct)), None)


def choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is Literal else ()


def legal(hint: Any) -> str:
    """The legal values of a type as text."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join("none" if arg is type(None) else legal(arg) for arg in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list, of {legal(get_args(hint)[0])} each"
    if get_origin(hint) is Literal:
        return ", ".join(str(choice) for choice in get_args(hint))
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if get_origin(hint) is Annotated:
        base, meta = get_args(hint)[:2]
        assert isinstance(meta, Meta)
        if meta.description is not None:
            return meta.description
        low = f"from {meta.ge:g}" if meta.ge is not None else f"above {meta.gt:g} and up"
        return f"{words[base]} {low} to {meta.le:g}" if base is float else f"{words[base]} {low} to {meta.le}"
    return words.get(hint, f"a section with {', '.join(typing.get_type_hints(hint))}")
