"""Wraps methods of another library's objects, and restores them; intercepts iteration over data loaders."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from agents.loop.loop import Loop


class Patches:
    """Wraps methods of objects for the duration of a training run. Only the given objects change, not their classes."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace the method `name` of `owner`. `around` is called with the original method and the arguments."""
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapped)
        self._undo.append(lambda: setattr(owner, name, own) if own is not None else delattr(owner, name))

    def operation(self, loop: Loop, owner: Any, name: str, doing: str) -> None:
        """While the method `name` of `owner` runs, report `doing` as the operation of this rank. Does nothing if
        `owner` has no such method."""

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            with loop.operation(doing):
                return original(*args, **kwargs)

        if callable(getattr(owner, name, None)):
            self.wrap(owner, name, around)

    def undo(self) -> None:
        """Restore all wrapped methods."""
        while self._undo:
            self._undo.pop()()


def follow(loader: Any, around: Callable[[Iterator[Any]], Iterator[Any]]) -> bool:
    """Make each iteration over `loader` use the iterator that `around` returns; `around` is called with the original
    iterator. Python looks up ``__iter__`` on the class of the loader, so the class of the loader is replaced by a
    subclass. Returns False if the class of `loader` cannot be replaced, as with a list or a generator.
    """
    kind = type(loader)

    def iterate(own: Any) -> Iterator[Any]:
        return around(kind.__iter__(own))

    try:
        followed = type(kind.__name__, (kind,), {"__iter__": iterate})
        # A loader of Accelerate has a property `__class__`, so the attribute of `object` is set.
        vars(object)["__class__"].__set__(loader, followed)
    except TypeError:  # a class of the interpreter
        return False
    return True
