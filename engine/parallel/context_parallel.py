"""Context parallelism: attention over whole sequences that are split over the cp ranks.

Shapes: B sequences, H query heads and G key heads of this tp rank, S tokens of this cp rank, C head width.
"""

from collections.abc import Callable

from torch import Tensor

from engine.kernels.window_attention import window_attention
from engine.parallel.collectives import Axis
from engine.parallel.ring_attention import ring_attention
from engine.parallel.sequence_split import positions
from engine.parallel.ulysses import ulysses_attention

ATTENTION_METHODS: dict[str, Callable[[Tensor, Tensor, Tensor, Axis, int | None], Tensor]] = {
    "ulysses": ulysses_attention,
    "ring": ring_attention,
}


class ContextParallel:
    """Attention over the `cp` axis, with one of ATTENTION_METHODS. `sequence` is the axis of all cp x tp ranks that
    share a sequence."""

    def __init__(self, cp: Axis, sequence: Axis, method: str):
        self.cp, self.sequence = cp, sequence
        self._method = ATTENTION_METHODS[method]

    @classmethod
    def whole(cls, tp: Axis) -> "ContextParallel":
        """The one for runs without cp: each tp rank has all tokens of the sequence after the gather over tp."""
        return cls(Axis("cp", None, tp.meter), tp, "ring")

    def positions(self, seq_len: int) -> Tensor:
        """Positions of this rank's tokens in the sequence, [S]."""
        return positions(seq_len, self.cp.size, self.cp.rank)

    def attend(self, q_BHSC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, window: int | None = None) -> Tensor:
        """Causal attention over the whole sequence, [B, H, S, C], or to the newest `window` keys; G divides H."""
        if self.cp.size == 1:
            return window_attention(q_BHSC, k_BGSC, v_BGSC, window)
        return self._method(q_BHSC, k_BGSC, v_BGSC, self.cp, window)
