"""The transformer: dense MLP, blocks (attention and MLP or experts), and pipeline stages of consecutive blocks.

Shapes: B sequences, S tokens of this rank's cp slice (the whole sequence with cp = 1), s = S/tp tokens of its tp slice,
D model, H heads, C head width. Parameter names contain global layer numbers, so a stage's state is a subset of the
model's state.
"""

from torch import Tensor, nn

from engine.config.knob_values import KnobValues
from engine.config.sections.model import Model
from engine.metering.meter import Meter
from engine.model.attention import Attention
from engine.model.embedding import Embedding
from engine.model.head import Head
from engine.model.latent_attention import LatentAttention
from engine.model.moe.moe_layer import MoeLayer, Routing
from engine.model.recompute import recomputed
from engine.model.rms_norm import RMSNorm
from engine.model.swiglu import gated_function
from engine.parallel.autograd_collectives import gather_sequence, scatter_sequence
from engine.parallel.context.documents import Documents
from engine.parallel.local_shards import linear
from engine.parallel.parameters import ParameterFactory


class Mlp(nn.Module):
    """Dense SwiGLU (Shazeer 2020), its width split over tp."""

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


class Block(nn.Module):
    """One layer: attention, then a dense MLP or experts. Each forward reads the knob `recompute`."""

    def __init__(
        self, factory: ParameterFactory, layer: int, model: Model, knob_values: KnobValues, meter: Meter
    ):
        super().__init__()
        self.layer, self.knob_values, self.meter = layer, knob_values, meter
        # Scale the initial output weights down with depth, so that the residual sum does not grow with it (GPT-2).
        out_std = 0.02 / (2 * model.layers) ** 0.5
        name = f"layers.{layer}"
        self.attention_norm = RMSNorm(factory, model.d_model, model.norm_eps)
        self.attention = ATTENTIONS[model.attention](factory, f"{name}.attention", model, out_std)
        self.mlp_norm = RMSNorm(factory, model.d_model, model.norm_eps)
        self.mlp: MoeLayer | Mlp
        if model.moe and model.has_experts(layer):
            self.mlp = MoeLayer(factory, layer, model.moe, model.d_model, out_std, knob_values, meter)
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
        """`x` plus the output of the MLP or of the experts. `cache` stores the routing for a recomputed forward."""
        h = self.mlp_norm(x)
        out: Tensor = x + (self.mlp(h, cache) if isinstance(self.mlp, MoeLayer) else self.mlp(h))
        return out

    def _layer(self, x: Tensor, documents: Documents | None, cache: dict[str, Routing]) -> Tensor:
        return self.mlp_block(self._attention_block(x, documents), cache)


class Stage(nn.Module):
    """Consecutive layers. The first stage has the embedding; the last one has the head and returns logits
    [B, S, V/tp]."""

    def __init__(
        self, factory: ParameterFactory, model: Model, layers: range, knob_values: KnobValues, meter: Meter
    ):
        super().__init__()
        first, last = layers.start == 0, layers.stop == model.layers
        self.context, self.window = factory.context, model.window
        self.embedding = Embedding(factory, model.vocab, model.d_model) if first else None
        self.layers = nn.ModuleDict({str(n): Block(factory, n, model, knob_values, meter) for n in layers})
        self.norm = RMSNorm(factory, model.d_model, model.norm_eps) if last else None
        tied = self.embedding.weight if self.embedding is not None and model.tie_embeddings else None
        self.tied = tied is not None
        copied = model.tie_embeddings and not first
        self.head = Head(factory, model.vocab, model.d_model, tied, copied) if last else None

    def forward(self, x: Tensor, starts: Tensor | None = None) -> Tensor:
        """`starts` [B, W]: for each token of the whole sequences, the position where its document starts; None
        if attention crosses documents."""
        if self.embedding is not None:
            x = self.embedding(x)
        documents = None if starts is None else self.context.documents(starts, x.dtype, self.window)
        for block in self.layers.values():
            x = block(x, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x
