"""With a cache, logits equal those of a full forward pass for every kind of model. The cache has the size that the
planner's formula gives."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.mesh import World
from engine.parallel.parameters import ParameterFactory
from engine.planner.memory.cache import cache_bytes
from engine.sampling.decoder import Decoder
from engine.sampling.settings import sampling_layout
from tests.ranks.cases.case import LAYOUT, SMALL, V3
from tests.ranks.cases.over_models import MLA, QWEN2, QWEN3, WIDE_VALUES, WINDOW

DENSE = ["model.moe=none"]
KINDS = {
    "dense": DENSE,
    "multi-query": [*DENSE, "model.kv_heads=1"],
    "experts": [],
    "windows": WINDOW,
    "narrow windows": ["model.window=3"],
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "deepseek": [*MLA, *V3],
    "latent, direct queries": WIDE_VALUES,
    "tied": ["model.tie_embeddings=true"],
}
PASSES = (7, 1, 1, 4, 1)  # tokens of each pass: a prefill, then one or several tokens


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    dist.destroy_process_group()


def meter_of(layout: Layout) -> Meter:
    return Meter(layout.model.layers, layout.model.moe.experts if layout.model.moe else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_the_full_forward(kind: str) -> None:
    trained = load(LAYOUT, [*SMALL, *KINDS[kind]])
    layout = sampling_layout(trained, [])
    meter = meter_of(trained)
    factory = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    whole = Stage(factory, trained.model, range(trained.model.layers), KnobValues.of(trained), meter)
    with torch.no_grad():
        # The noise makes the scores of experts differ clearly.
        for number, parameter in enumerate(whole.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(0.2 * noise)

    decoder = Decoder(layout, World(layout.ranks, meter), meter_of(layout), 2, trained.model.seq_len)
    decoder.stage.load_state_dict(whole.state_dict(), assign=True)
    tokens = torch.randint(0, 256, (2, trained.model.seq_len), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = whole(tokens)[:, : sum(PASSES)]
    parts = [decoder.run(part, last=False) for part in torch.split(tokens[:, : sum(PASSES)], PASSES, 1)]
    torch.testing.assert_close(
        torch.cat([p for p in parts if p is not None], 1), expected, rtol=1e-10, atol=1e-10
    )
    formula = cache_bytes(trained.model, trained.model.layers, 1, trained.model.seq_len, 2, 8)
    assert decoder.caches.bytes == formula
