"""Generates tokens: one pass over the prompt (prefill), then one pass for each token (decode).

Shapes: B sequences, P tokens of the prompt.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.parallel.mesh import World
from engine.sampling.cache import Caches
from engine.sampling.choice import choose
from engine.sampling.settings import Choice


class CachedModel(Protocol):
    """A model that keeps attention caches between passes. `chooser` is the rank that chooses tokens; it holds the last
    stage."""

    world: World
    caches: Caches
    chooser: int

    def run(self, tokens_BQ: Tensor) -> Tensor | None:
        """Run the model on the next tokens of each sequence. Returns the logits of the last token, [B, 1, V], on the
        rank `chooser`. Collective over all ranks."""


@dataclass(frozen=True)
class Generated:
    """The generated tokens, with times in seconds. The prefill also yields the first token, so the decode rate counts
    only the other tokens."""

    tokens: list[list[int]]  # [B, new tokens]
    prompt_tokens: int  # of one sequence
    prefill_s: float
    decode_s: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, over all sequences."""
        return len(self.tokens) * self.prompt_tokens / self.prefill_s

    @property
    def decode_rate(self) -> float | None:
        """Decoded tokens per second, summed over all sequences. The first token of each sequence is not counted,
        because the prefill generates it. None if no further tokens were generated."""
        count = len(self.tokens) * (len(self.tokens[0]) - 1)
        return count / self.decode_s if count else None


def generate(
    model: CachedModel,
    prompt_BP: Tensor,
    most: int,
    choice: Choice,
    end: int | None = None,
    on_tokens: Callable[[list[int]], object] = lambda _: None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Generated:
    """Generate up to `most` tokens after each prompt; all ranks return the same result. Collective over all ranks.

    The rank `chooser` sends the tokens to all other ranks. Generation stops early when every
    sequence has produced the token `end`, or when `stop_requested` returns True. `on_tokens` is called with each
    sequence's new token.
    """
    world = model.world
    B, ended_B = len(prompt_BP), torch.zeros(len(prompt_BP), dtype=torch.bool)
    new: list[list[int]] = []
    prefilled = start = time.perf_counter()
    tokens_BQ, stop = prompt_BP.to(world.device), False
    while len(new) < most and not stop:
        logits = model.run(tokens_BQ)
        sent = torch.zeros(B + 1, dtype=torch.int64)  # the tokens, and whether to stop
        if logits is not None and world.rank == model.chooser:
            sent[:B] = choose(logits[:, -1], choice, model.caches.length)
            ended_B |= sent[:B] == (-1 if end is None else end)
            sent[B] = bool(ended_B.all()) or stop_requested()
        world.control.start_broadcast(sent, model.chooser).wait()
        if not new:
            prefilled = time.perf_counter()
        *row, stop = sent.tolist()
        new.append(row)
        on_tokens(row)
        tokens_BQ = sent[:B, None].to(world.device)
    done = time.perf_counter()
    by_sequence = [list(sequence) for sequence in zip(*new, strict=True)]
    return Generated(by_sequence, prompt_BP.shape[1], prefilled - start, done - prefilled)
