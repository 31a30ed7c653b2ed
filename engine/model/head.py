"""Output head with the vocabulary sharded over tp."""

from torch import Tensor, nn

from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory


class Head(nn.Module):
    """Maps this rank's slice [B, S/tp, D] to logits of the whole sequence for a part of the vocabulary, [B, S, V/tp].

    If the head shares the embedding's weight (Press and Wolf 2017), `tied` is that weight; both are sharded in the same
    way. If the embedding is on another stage, `copied` is True. Then the head has a copy of the weight with the same
    initial values, and the optimizer keeps the copy equal to the original.
    """

    def __init__(
        self,
        factory: ParameterFactory,
        vocab: int,
        d_model: int,
        tied: nn.Parameter | None = None,
        copied: bool = False,
    ):
        super().__init__()
        self.tp, self.copied = factory.tp, copied
        name = "embedding" if copied else "head"
        self.weight = factory.sharded(name, (vocab, d_model), 0.02, 0) if tied is None else tied

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.project(gather_sequence(x_BSD, self.tp))

    def project(self, x_BSD: Tensor) -> Tensor:
        """Logits of gathered tokens, [B, S, D] -> [B, S, V/tp]."""
        return nn.functional.linear(x_BSD, local_weight(self.weight))
