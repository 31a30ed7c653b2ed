"""Carries telemetry out of a training run and commands into it. Imports neither torch nor Textual.

`agents.join` joins a training loop that is not ours (docs/library.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.loop.join import join as join
    from agents.loop.loop import Loop as Loop


def __getattr__(name: str) -> Any:
    """Import `join` and `Loop` on first use, so that importing `agents` alone stays cheap."""
    if name == "join":
        from agents.loop.join import join

        return join
    if name == "Loop":
        from agents.loop.loop import Loop

        return Loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
