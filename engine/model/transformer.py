"""The transformer: dense MLP, blocks (attention and MLP or experts), and the built-in model made of them.

Shapes: B sequences, S tokens of this rank's cp slice (the whole sequence with cp = 1), s = S/tp tokens of its tp slice,
D model width, H heads, C head dimension.
"""

import torch
from torch import Tensor, nn

from engine.config.checks.supported import EVERYTHING
from engine.config.sections.model import Model
from engine.model.attention import Attention
from engine.model.interface import Block, Parts
from engine.model.latent_attention import LatentAttention
from engine.model.moe.moe_layer import MoeLayer, Routing
from engine.model.recompute import recomputed
from engine.model.rms_norm import RMSNorm
from engine.model.swiglu import gated_function
from engine.model.vocabulary import Embedding, Head
from engine.parallel.autograd_collectives import gather_sequence, scatter_sequence
from engine.parallel.context.documents import Documents
from engine.parallel.local_shards import linear
from engine.parallel.parameters import ParameterFactory
from engine.planner.hardware.peaks import multiply_adds


class Mlp(nn.Module):
    """Dense SwiGLU MLP (Shazeer 2020), with its width split over tp."""

    def __init__(self, factory: ParameterFactory, name: str, model: Model, out_std: float):
        super().__init__()
        self.tp = factory.tp
        self.gate = factory.sharded(f"{name}.gate", (model.ff, model.d_model), 0.02, 0)
        self.up = factory.sharded(f"{name}.up", (model.ff, model.d_model), 0.02, 0)
        self.down = factory.sharded(f"{name}.down", (model.d_model, model.ff), out_std, 1)
        self.gate_bias: nn.Parameter | None = None
        self.up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if model.bias:
            self.gate_bias, self.up_bias = factory.zeros((model.ff,), 0), factory.zeros((model.ff,), 0)
            self.down_bias = factory.zeros((model.d_model,))
        self._gated = gated_function(factory.compiled)

    def forward(self, x_BsD: Tensor) -> Tensor:
        x = gather_sequence(x_BsD, self.tp)
        hidden = self._gated(linear(x, self.gate, self.gate_bias), linear(x, self.up, self.up_bias))
        out = scatter_sequence(linear(hidden, self.down), self.tp)
        return out if self.down_bias is None else out + self.down_bias


ATTENTIONS: dict[str, type[Attention] | type[LatentAttention]] = {"gqa": Attention, "mla": LatentAttention}


class TransformerBlock(Block):
    """One layer: attention, then a dense MLP or experts. Each forward pass reads the knob `recompute`."""

    def __init__(self, parts: Parts, layer: int):
        super().__init__(parts, layer)
        factory, model = parts.factory, parts.model
        # Scale the initial output weights down with depth, so that the residual sum does not grow with it (GPT-2).
        out_std = 0.02 / (2 * model.layers) ** 0.5
        name = f"layers.{layer}"
        self.attention_norm = RMSNorm(factory, model.d_model, model.norm_eps)
        self.attention = ATTENTIONS[model.attention](factory, f"{name}.attention", model, out_std)
        self.mlp_norm = RMSNorm(factory, model.d_model, model.norm_eps)
        self.mlp: MoeLayer | Mlp
        if model.moe and model.has_experts(layer):
            self.mlp = MoeLayer(
                factory, layer, model.moe, model.d_model, out_std, parts.knob_values, parts.meter
            )
        else:
            self.mlp = Mlp(factory, f"{name}.mlp", model, out_std)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        with self.meter.in_layer(self.layer):
            cache: dict[str, Routing] = {}
            match self.knob_values.recompute:
                case "full":
                    return recomputed(self._layer, x, documents, cache, meter=self.meter, layer=self.layer)
                case "selective":
                    block = self._attention_block
                    attended = recomputed(block, x, documents, meter=self.meter, layer=self.layer)
                    return self.mlp_block(attended, cache)
                case _:
                    return self._layer(x, documents, cache)

    def _attention_block(self, x: Tensor, documents: Documents | None) -> Tensor:
        out: Tensor = x + self.attention(self.attention_norm(x), documents)
        return out

    def mlp_block(self, x: Tensor, cache: dict[str, Routing]) -> Tensor:
        """The MLP or the experts, with the norm before them and the residual connection. The first forward pass stores
        the router's decisions in `cache`; a recomputed forward pass uses them again."""
        h = self.mlp_norm(x)
        out: Tensor = x + (self.mlp(h, cache) if isinstance(self.mlp, MoeLayer) else self.mlp(h))
        return out

    def _layer(self, x: Tensor, documents: Documents | None, cache: dict[str, Routing]) -> Tensor:
        return self.mlp_block(self._attention_block(x, documents), cache)


class Transformer:
    """The built-in model, an implementation of `engine.model.interface`. The parameter factory creates all of the
    model's parameters."""

    support = EVERYTHING

    def embedding(self, parts: Parts) -> Embedding:
        return Embedding(parts.factory, parts.model.vocab, parts.model.d_model)

    def block(self, parts: Parts, layer: int) -> "TransformerBlock":
        return TransformerBlock(parts, layer)

    def norm(self, parts: Parts) -> RMSNorm:
        return RMSNorm(parts.factory, parts.model.d_model, parts.model.norm_eps)

    def head(self, parts: Parts, embedding: nn.Module | None) -> Head:
        model = parts.model
        tied = embedding.weight if isinstance(embedding, Embedding) and model.tie_embeddings else None
        copied = model.tie_embeddings and embedding is None
        return Head(parts.factory, model.vocab, model.d_model, tied, copied)

    def std(self, model: Model, name: str, shape: torch.Size) -> float:
        raise AssertionError(f"{name} was not created by the factory")

    def multiply_adds(self, model: Model, layer: int | None) -> float:
        return multiply_adds(model, layer)
