"""Multi-token prediction equals a plain implementation of its formulas (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.layout import Layout
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.loss import training_loss
from engine.model.stage import Prediction, Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.train.batches.samples import further_targets
from tests.unit.engine.config.test_layout import DEMO

SMALL = [
    *["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "model.layers=2", "model.seq_len=24"],
    *["model.mtp_layers=2", "knobs.aux_loss_coef=0.0", "train.mtp_weight=0.4"],
]
ALONE = Axis("tp", None, Meter())


@pytest.fixture
def layout() -> Layout:
    return load(DEMO, SMALL)


@pytest.fixture
def stage(layout: Layout) -> Stage:
    meter = Meter(4, 8)
    weights = ParameterFactory(3, Axis("tp", None, meter), Axis("ep", None, meter))
    return Stage(weights, layout.model, range(2), replace(KnobValues.of(layout)), meter)


@pytest.fixture
def text() -> Tensor:
    """Sequences of 25 tokens: 24 input tokens, and one more token, the target of the last input token."""
    return torch.randint(0, 256, (3, 25), generator=torch.Generator().manual_seed(5))


def plain_losses(stage: Stage, text: Tensor) -> tuple[Tensor, Tensor]:
    """The main loss summed over all positions, and the mean of the prediction layers' losses, each summed over its
    positions. Layer k omits the last k positions, which have no token k + 1 positions ahead."""
    p = dict(stage.named_parameters())

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * p[name]

    state = p["embedding.weight"][text[:, :-1]]
    for block in stage.layers.values():
        state = block(state)
    head, length = p["head.weight"], text.shape[1] - 1
    main = F.cross_entropy((norm(state, "norm.weight") @ head.T).mT, text[:, 1:], reduction="sum")
    further = []
    for k, (n, module) in enumerate(stage.mtp.items(), 1):
        assert isinstance(module, Prediction)
        kept = length - k  # the last position has no token k + 1 positions further
        embedded = norm(p["embedding.weight"][text[:, k : k + kept]], f"mtp.{n}.embedding_norm.weight")
        joined = torch.cat((norm(state[:, :kept], f"mtp.{n}.state_norm.weight"), embedded), -1)
        joined = F.pad(joined @ p[f"mtp.{n}.joint"].T, (0, 0, 0, length - kept))
        state = module.block(joined)
        logits = norm(state[:, :kept], f"mtp.{n}.last_norm.weight") @ head.T
        further.append(F.cross_entropy(logits.mT, text[:, k + 1 :], reduction="sum"))
    return main, torch.stack(further).mean()


def test_equals_a_plain_implementation(stage: Stage, text: Tensor) -> None:
    """Compares the loss and the gradients. The returned loss is only the next-token loss, without the losses of the
    multi-token prediction layers."""
    main, further = plain_losses(stage, text)
    (0.01 * (main + 0.4 * further)).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in stage.named_parameters()}
    stage.zero_grad()
    targets = further_targets(text[:, 1:], 2)
    loss = training_loss(stage(text[:, :-1], None, targets), targets, ALONE, 0.01, 0.4)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, 0.01 * main)
    for name, p in stage.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    assert {name.split(".")[1] for name in expected if name.startswith("mtp")} == {"2", "3"}


def test_without_targets_only_the_next_token_is_predicted(stage: Stage, text: Tensor) -> None:
    """Validation and text generation skip the multi-token prediction layers."""
    targets = further_targets(text[:, 1:], 2)
    with torch.no_grad():
        logits, all_logits = stage(text[:, :-1]), stage(text[:, :-1], None, targets)
    assert logits.shape == (3, 24, 256) and all_logits.shape == (9, 24, 256)
    torch.testing.assert_close(logits, all_logits[:3])


def test_targets_end_with_the_sequence_and_the_document() -> None:
    """The sequence consists of two documents, 10 11 12 and 20 21 22, and the first token of a third one."""
    tokens = torch.tensor([[10, 11, 12, 20, 21, 22, 30]])
    starts = torch.tensor([[0, 0, 0, 3, 3, 3]])
    assert further_targets(tokens[:, 1:], 2).tolist() == [
        [[11, 12, 20, 21, 22, 30], [12, 20, 21, 22, 30, -1], [20, 21, 22, 30, -1, -1]]
    ]
    assert further_targets(tokens[:, 1:], 2, starts).tolist() == [
        [[11, 12, 20, 21, 22, 30], [12, 20, -1, 22, 30, -1], [20, -1, -1, 30, -1, -1]]
    ]
