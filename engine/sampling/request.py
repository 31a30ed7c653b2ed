"""The request that a command passes to the ranks that generate text, and the callbacks by which the ranks report the
result. Torch-free."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.checkpoint.manifest import Checkpoint
from engine.config.layout import Layout
from engine.sampling.settings import Choice

if TYPE_CHECKING:
    from engine.sampling.generation import Generated

OnTokens = Callable[[list[int]], object]
OnGenerated = Callable[["Generated", int, int], object]


@dataclass(frozen=True)
class Request:
    """The prompt, weights and settings for generating text. `end`: the token after which generation stops."""

    layout: Layout
    checkpoint: Checkpoint
    prompt: list[int]
    tokens: int
    choice: Choice
    end: int | None
