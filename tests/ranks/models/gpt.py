"""A GPT as an example of a user's own model: learned positions, GELU MLP, LayerNorm (docs/train/own_model.md)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.model.interface import Block, Model, Parts, Support


class GptEmbedding(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        self.tokens = nn.Embedding(model.vocab, model.d_model)
        self.positions = nn.Embedding(model.seq_len, model.d_model)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        out: Tensor = self.tokens(tokens_BS) + self.positions(positions_S)
        return out


class GptBlock(Block):
    def __init__(self, parts: Parts, layer: int):
        super().__init__(parts, layer)
        model = parts.model
        self.heads = model.heads
        self.norm1, self.norm2 = (nn.LayerNorm(model.d_model, model.norm_eps) for _ in range(2))
        self.qkv = nn.Linear(model.d_model, 3 * model.d_model)
        self.out = nn.Linear(model.d_model, model.d_model)
        self.up = nn.Linear(model.d_model, model.ff)
        self.down = nn.Linear(model.ff, model.d_model)

    def compute(self, x_BSD: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x_BSD)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each [B, heads, S, D / heads]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BSD = x_BSD + self.out(seen.transpose(1, 2).flatten(2))
        out: Tensor = x_BSD + self.down(F.gelu(self.up(self.norm2(x_BSD))))
        return out


class Gpt:
    support = Support(keys=frozenset({"d_ff", "norm_eps"}))

    def embedding(self, parts: Parts) -> nn.Module:
        with torch.device("meta"):
            return GptEmbedding(parts.model)

    def block(self, parts: Parts, layer: int) -> Block:
        with torch.device("meta"):
            return GptBlock(parts, layer)

    def norm(self, parts: Parts) -> nn.Module:
        return nn.LayerNorm(parts.model.d_model, parts.model.norm_eps, device="meta")

    def head(self, parts: Parts, embedding: nn.Module | None) -> nn.Module:
        return nn.Linear(parts.model.d_model, parts.model.vocab, bias=False, device="meta")

    def std(self, model: Model, name: str, shape: torch.Size) -> float:
        if len(shape) == 1:
            return 0.0  # norms and biases
        residual = name.endswith(("out.weight", "down.weight"))
        return float(0.02 / (2 * model.layers) ** 0.5 if residual else 0.02)

    def multiply_adds(self, model: Model, layer: int | None) -> float:
        D = model.d_model
        if layer is None:
            return D * model.vocab
        return 4 * D * D + D * model.seq_len + 2 * D * model.ff
