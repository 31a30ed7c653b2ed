"""Hooks into torch: optimizers, backward, data loaders, collectives and gradient scalers.

Hooks are set on classes and Python modules, never on instances, because programs copy and pickle their instances. In
code compiled by torch, a hook only calls the original function. If the cockpit's code raises an exception, the hooks
are removed; exceptions of the program propagate unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

from agents.rundir import standard_streams

Around = Callable[..., Any]


class Hooks:
    """The functions of torch that are wrapped in this process, in order to measure its training. `on`: whether the
    wrappers measure; if False, they only call the original functions."""

    def __init__(self) -> None:
        self.on = True
        self._remove: list[Callable[[], None]] = []
        self._ended: list[Callable[[], object]] = []

    def at_end(self, work: Callable[[], object]) -> None:
        """Register `work`, which is called when the hooks are removed."""
        self._ended.append(work)

    def wrap(self, owner: Any, name: str, around: Around, also: tuple[Any, ...] = ()) -> None:
        """Wrap the function `name` of a class or module: each call goes to `around`, with the original function and the
        arguments. `also`: other modules that have imported the function, and in which it is wrapped too. Does nothing
        if `owner` has no function `name`."""
        original = getattr(owner, name, None)
        if original is None:
            return
        from torch.compiler import is_compiling

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self.on:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        for place in (owner, *(one for one in also if getattr(one, name, None) is original)):
            self._replace(place, name, wrapped)

    def _replace(self, place: Any, name: str, wrapped: Any) -> None:
        inherited = name not in vars(place)
        before = None if inherited else vars(place)[name]
        setattr(place, name, wrapped)

        def restore() -> None:
            if vars(place).get(name) is not wrapped:
                return  # other code has wrapped it since, and calls this hook as its original
            if inherited:
                delattr(place, name)
            else:
                setattr(place, name, before)

        self._remove.append(restore)

    def optimizers(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Install two hooks on every optimizer: `before` runs before each step, and `after` runs after it. The
        arguments of both are the optimizer, and the arguments of the step as a tuple and a dictionary; `before` may
        return others."""
        from torch.compiler import is_compiling
        from torch.optim import optimizer

        def around(work: Callable[..., Any]) -> Callable[..., Any]:
            def hook(stepping: Any, args: Any, kwargs: Any) -> Any:
                return work(stepping, args, kwargs) if self.on and not is_compiling() else None

            return hook

        self._remove.append(optimizer.register_optimizer_step_pre_hook(around(before)).remove)
        self._remove.append(optimizer.register_optimizer_step_post_hook(around(after)).remove)

    def guarded(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work`. If `work` raises an exception, remove the hooks; the program continues."""
        try:
            return work(*args)
        except Exception as error:  # noqa: BLE001 - the program must run as without the cockpit
            self.fail(error)
            return None

    def fail(self, error: BaseException) -> None:
        """Remove the hooks because of an error in the cockpit's code, and print the error once."""
        if self.on:
            self.end(f"{type(error).__name__}: {error}")

    def end(self, why: str = "") -> None:
        """Remove the hooks, and print the reason `why` if it is given."""
        if not self.on:
            return
        self.on = False
        if why:
            say(f"the program continues without the cockpit: {why}")
        for work in [*self._remove, *self._ended]:
            try:
                work()
            except Exception:  # noqa: BLE001 - nothing of ours may reach the program
                continue


def say(text: str) -> None:
    """Print one line on stderr; ignore errors, and do not wait for its reader."""
    standard_streams.say(f"cockpit wrap: {text}\n")
