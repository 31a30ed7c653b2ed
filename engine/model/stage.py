"""A pipeline stage of any model: consecutive blocks, with the embedding on the first stage, norm and head on the last.

Shapes: B sequences, S tokens of this rank's cp slice (the whole sequence with cp = 1), s = S/tp tokens of its tp slice,
D model, V vocabulary. Parameter names contain global layer numbers, so a stage's state is a subset of the model's
state.
"""

from torch import Tensor, nn

from engine.config.knob_values import KnobValues
from engine.config.refusal import LayoutError
from engine.config.sections.model import Model
from engine.metering.meter import Meter
from engine.model.interface import Block, Parts, implementation_of
from engine.parallel.parameters import ParameterFactory


class Stage(nn.Module):
    """Consecutive layers of the model that `model.implementation` names. The last stage returns logits [B, S, V/tp].

    `tied`: whether the head shares parameters with the embedding of this stage. Raises LayoutError if the model's parts
    are not modules or blocks.
    """

    def __init__(
        self, factory: ParameterFactory, model: Model, layers: range, knob_values: KnobValues, meter: Meter
    ):
        super().__init__()
        first, last = layers.start == 0, layers.stop == model.layers
        self.context, self.window = factory.context, model.window
        made, parts = implementation_of(model), Parts(factory, model, knob_values, meter)

        def part(name: str, built: object, kind: type[nn.Module] = nn.Module) -> nn.Module:
            """`built`, with the parameters that the factory has not created replaced by those of the factory."""
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
        self.head = part("head", made.head(parts, self.embedding)) if last else None
        self.tied = bool({*_parameters(self.embedding)} & {*_parameters(self.head)})

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


def _parameters(part: nn.Module | None) -> list[nn.Parameter]:
    return [] if part is None else list(part.parameters())
