"""Token embedding and output head, with the vocabulary sharded over tp."""

from torch import Tensor, nn

from engine.parallel.autograd_collectives import gather_sequence, scatter_sequence
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory


class Embedding(nn.Module):
    """Maps the token ids of the whole sequence, [B, S], to the embeddings of this rank's slice, [B, S/tp, D]. Each rank
    holds V/tp rows.

    `copied`: the model's embedding is on another stage, and this module is a copy of it for multi-token prediction,
    with the same initial values. The optimizer keeps the weights of this copy equal to those of the model's
    embedding."""

    def __init__(self, factory: ParameterFactory, vocab: int, d_model: int, copied: bool = False):
        super().__init__()
        self.tp, self.copied = factory.tp, copied
        self.rows = vocab // self.tp.size
        self.weight = factory.sharded("embedding", (vocab, d_model), 0.02, 0)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        local_BS = tokens_BS - self.tp.rank * self.rows
        elsewhere = (local_BS < 0) | (local_BS >= self.rows)
        rows = nn.functional.embedding(local_BS.masked_fill(elsewhere, 0), local_weight(self.weight))
        return scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)


class Head(nn.Module):
    """Maps this rank's slice [B, S/tp, D] to logits of the whole sequence for a part of the vocabulary, [B, S, V/tp].

    If the head shares the embedding's weight (Press and Wolf 2017), `tied` is that weight; both are sharded in the same
    way. If the embedding is on another stage, `copied` is True. Then the head has a copy of the embedding's weight with
    the same initial values, and the optimizer keeps both equal.
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
