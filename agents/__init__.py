"""Carries telemetry out of a training run and commands in. Imports neither torch nor a screen.

`agents.join` is the way in for a training loop that is not ours (docs/library.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.loop.join import Loop as Loop
    from agents.loop.join import join as join


def __getattr__(name: str) -> Any:
    """Only who joins pays for the import of what it takes: the wire alone is lighter."""
    if name in ("Loop", "join"):
        from agents.loop import join as loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
