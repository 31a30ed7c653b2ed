"""A pipeline stage of any model: consecutive blocks, with the embedding on the first stage, norm and head on the last.

Shapes: B sequences, S tokens of this rank's cp slice (the whole sequence with cp = 1), s = S/tp tokens of its tp slice,
D model width, V vocabulary, P multi-token prediction layers. Parameter names contain global layer indices, so a stage's
state dict is a subset of the model's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from engine.config.knob_values import KnobValues
from engine.config.refusal import LayoutError
from engine.config.sections.model import Model
from engine.metering.meter import Meter
from engine.model.interface import Block, Parts, implementation_of
from engine.model.rms_norm import RMSNorm
from engine.model.vocabulary import Embedding
from engine.parallel.context.documents import Documents
from engine.parallel.parameters import ParameterFactory


class Prediction(nn.Module):
    """One module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, eq. 21 and 22). The module combines the
    hidden state of the previous module, [B, s, D], with the embedding of a further token, [B, s, D], and applies one
    block to the result.

    The projection `joint` is replicated over tp; each tp rank applies it to its slice of the sequence.
    """

    def __init__(self, parts: Parts, layer: int, block: nn.Module):
        super().__init__()
        factory, D, eps = parts.factory, parts.model.d_model, parts.model.norm_eps
        self.state_norm, self.embedding_norm = RMSNorm(factory, D, eps), RMSNorm(factory, D, eps)
        self.joint = factory.replicated(f"mtp.{layer}.joint", (D, 2 * D), 0.02)
        self.block = block
        self.last_norm = RMSNorm(factory, D, eps)

    def forward(self, state: Tensor, embedded: Tensor, documents: Documents | None) -> Tensor:
        joined = torch.cat((self.state_norm(state), self.embedding_norm(embedded)), -1)
        out: Tensor = self.block(nn.functional.linear(joined, self.joint), documents)
        return out


class Stage(nn.Module):
    """A pipeline stage: consecutive layers of the model that the layout key `model.implementation` names. The last
    stage returns logits [B, S, V/tp]. With multi-token prediction they are [(1 + P) B, S, V/tp]: first the logits for
    the next token of all B sequences, then those of each multi-token prediction layer.

    `tied`: whether the head shares parameters with the embedding of this stage. Raises LayoutError if a layer of the
    model is not a `Block`, or another part is not an `nn.Module`.
    """

    def __init__(
        self, factory: ParameterFactory, model: Model, layers: range, knob_values: KnobValues, meter: Meter
    ):
        super().__init__()
        first, last = layers.start == 0, layers.stop == model.layers
        self.context, self.window = factory.context, model.window
        made, parts = implementation_of(model), Parts(factory, model, knob_values, meter)

        def part(name: str, built: object, kind: type[nn.Module] = nn.Module) -> nn.Module:
            """Check that the model's module `built` is an instance of `kind`, and let `factory.adopt` replace those of
            its parameters that the factory did not create."""
            if not isinstance(built, kind):
                raise LayoutError(
                    f"model.implementation = {model.implementation} returns a {type(built).__name__} for {name}; "
                    f"legal: a {kind.__module__}.{kind.__name__}"
                )
            factory.adopt(built, name, lambda *of: made.std(model, *of))
            return built

        self.embedding = part("embedding", made.embedding(parts)) if first else None
        self.layers = nn.ModuleDict(
            {str(n): part(f"layers.{n}", made.block(parts, n), Block) for n in layers}
        )
        self.norm = part("norm", made.norm(parts)) if last else None
        self.embedding_copy: Embedding | None = None
        if last and not first and model.mtp_layers:
            self.embedding_copy = Embedding(factory, model.vocab, model.d_model, copied=True)
        embedding = self.embedding_copy if self.embedding is None else self.embedding
        self.head = part("head", made.head(parts, embedding)) if last else None
        self.mtp = nn.ModuleDict()
        for n in model.prediction_layers if last else ():
            block = part(f"layers.{n}", made.block(parts, n), Block)
            self.mtp[str(n)] = part(f"mtp.{n}", Prediction(parts, n, block))
        self.tied = bool({*_parameters(embedding)} & {*_parameters(self.head)})

    def forward(self, x: Tensor, starts: Tensor | None = None, targets: Tensor | None = None) -> Tensor:
        """`starts` [B, W]: for each token of the whole sequences, the position where its document starts; None if
        attention crosses documents. `targets` [B, 1 + P, S]: the next tokens, which multi-token prediction reads; if
        they are None, as in validation, there is no multi-token prediction."""
        if self.embedding is not None:
            x = self.embedding(x)
        documents = None if starts is None else self.context.documents(starts, x.dtype, self.window)
        for block in self.layers.values():
            x = block(x, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self._states(x, targets, documents))
        return x

    def _states(self, x: Tensor, targets: Tensor | None, documents: Documents | None) -> Tensor:
        """The normalised hidden states that the head reads: those of the main model and those of each multi-token
        prediction layer. They are concatenated along the batch dimension, so that the head runs only once."""
        assert self.norm is not None
        state: Tensor = self.norm(x)
        if targets is None or not self.mtp:
            return state
        return torch.cat((state, *self._predictions(x, targets, documents)))

    def _predictions(self, state: Tensor, targets: Tensor, documents: Documents | None) -> Iterator[Tensor]:
        """For each multi-token prediction layer, the normalised hidden states [B, s, D] from which the head predicts a
        further token."""
        embedding = self.embedding_copy if self.embedding is None else self.embedding
        for ahead, module in enumerate(self.mtp.values()):
            assert isinstance(module, Prediction) and embedding is not None
            # A position without a target has no further token. Its embedding does not matter: neither its own loss nor
            # that of an earlier position depends on it.
            embedded = embedding(targets[:, ahead].clamp(min=0))
            state = module(state, embedded, documents)
            yield module.last_norm(state)


def _parameters(part: nn.Module | None) -> list[nn.Parameter]:
    return [] if part is None else list(part.parameters())
