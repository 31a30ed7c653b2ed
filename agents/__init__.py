"""Transports telemetry from a training run to its clients, and commands from clients to the run.

`agents.join` connects any training loop to a hub (docs/join/library.md). The package imports neither torch nor Textual.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agents.loop.join import join as join
    from agents.loop.loop import Loop as Loop


def __getattr__(name: str) -> Any:
    """Import `join` and `Loop` on first use, so that `import agents` alone stays fast."""
    if name == "join":
        from agents.loop.join import join

        return join
    if name == "Loop":
        from agents.loop.loop import Loop

        return Loop
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
