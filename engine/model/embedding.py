"""Token embedding with the vocabulary sharded over tp."""

from torch import Tensor, nn

from engine.parallel.autograd_collectives import scatter_sequence
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory


class Embedding(nn.Module):
    """Maps the token ids of the whole sequence, [B, S], to the embeddings of this rank's slice, [B, S/tp, D]. Each rank
    holds V/tp rows."""

    def __init__(self, factory: ParameterFactory, vocab: int, d_model: int):
        super().__init__()
        self.tp = factory.tp
        self.rows = vocab // self.tp.size
        self.weight = factory.sharded("embedding", (vocab, d_model), 0.02, 0)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        local_BS = tokens_BS - self.tp.rank * self.rows
        elsewhere = (local_BS < 0) | (local_BS >= self.rows)
        rows = nn.functional.embedding(local_BS.masked_fill(elsewhere, 0), local_weight(self.weight))
        return scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.tp)
