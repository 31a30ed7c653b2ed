"""Output head over a sharded vocabulary."""

from torch import Tensor, nn

from engine.parallel.autograd_collectives import gather_sequence
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory


class Head(nn.Module):
    """This rank's slice [B, S/tp, D] to logits of the whole sequence over its share of the vocabulary [B, S, V/tp].

    Its weight may be the embedding's, `tied` (Press and Wolf 2017): both lie over tp in the same way. Where the
    embedding is on another stage, the head is `copied`: its weight begins as the same and is kept so.
    """

    def __init__(
        self,
        weights: ParameterFactory,
        vocab: int,
        d_model: int,
        tied: nn.Parameter | None = None,
        copied: bool = False,
    ):
        super().__init__()
        self.tp, self.copied = weights.tp, copied
        name = "embedding" if copied else "head"
        self.weight = weights.sharded(name, (vocab, d_model), 0.02, 0) if tied is None else tied

    def forward(self, x_BSD: Tensor) -> Tensor:
        return nn.functional.linear(gather_sequence(x_BSD, self.tp), local_weight(self.weight))
