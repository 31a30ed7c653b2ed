"""The learning rate schedules equal PyTorch's."""

import math

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from engine.config.learning_rate import learning_rate
from engine.config.refusal import LayoutError
from engine.config.sections.training import Train
from engine.config.toml import load
from tests.unit.engine.config.test_layout import DEMO

STEPS, WARMUP, END, DECAY, LR = 40, 5, 0.1, 12, 3e-3


def torch_rates(name: str) -> list[float]:
    """The learning rate of each step according to PyTorch's own schedulers, chained with `SequentialLR`."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    rest = STEPS - WARMUP
    parts: dict[str, list[tuple[LRScheduler, int]]] = {
        "constant": [(ConstantLR(optimizer, 1.0), rest)],
        "linear": [(LinearLR(optimizer, 1.0, END, rest), rest)],
        "cosine": [(CosineAnnealingLR(optimizer, rest, END * LR), rest)],
        "wsd": [(ConstantLR(optimizer, 1.0), rest - DECAY), (LinearLR(optimizer, 1.0, END, DECAY), DECAY)],
    }
    for group in optimizer.param_groups:  # the constructors have changed it
        group["lr"] = LR
    warmup = LinearLR(optimizer, 1 / WARMUP, 1.0, WARMUP - 1)
    ends, at = [WARMUP], WARMUP
    for _, length in parts[name][:-1]:
        ends.append(at := at + length)
    scheduler = SequentialLR(optimizer, [warmup, *(part for part, _ in parts[name])], ends)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_equals_torch(name: str) -> None:
    train = Train(
        steps=STEPS,
        lr=LR,
        warmup=WARMUP,
        lr_schedule=name,
        lr_end=END,
        decay=DECAY if name == "wsd" else None,
    )
    ours = [learning_rate(train, step, 1.0) for step in range(STEPS)]
    assert ours == pytest.approx(torch_rates(name), rel=1e-9)
    assert learning_rate(train, 20, 0.5) == pytest.approx(ours[20] / 2)
    last = {"constant": LR, "wsd": LR * (END + (1 - END) / DECAY)}
    assert ours[-1] == pytest.approx(last.get(name, ours[-1])) and math.isfinite(ours[-1]) and ours[-1] > 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.decay=5"], "train.decay = 5 requires train.lr_schedule = wsd"),
        (
            ["train.lr_schedule=wsd", "train.steps=10", "train.warmup=6", "train.decay=5"],
            "at most 10 together",
        ),
        (["train.lr_schedule=step"], "legal: constant, linear, cosine, wsd"),
        (["train.beta2=1.0"], "train.beta2 = 1.0"),
        (["train.ema=1.0"], "train.ema = 1.0"),
        (["train.eps=0.0"], "train.eps = 0.0"),
        (["validation.every=5"], "validation.every needs validation.shards"),
        (["validation.every=5", "validation.source=other"], "validation.source = 'other' is not legal"),
        (
            ["validation.every=5", "validation.source=stdlib", "validation.sequences=5"],
            "validation.sequences = 5 is not a multiple of 2 data ranks",
        ),
    ],
)
def test_illegal_keys(overrides: list[str], sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        load(DEMO, overrides)
