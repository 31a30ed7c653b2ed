"""The check of torch's grouped GEMM at the start of a run: it finds the faults that have been reported, and all ranks
then use one matmul per expert."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from agents.protocol import Event
from agents.rank.agent import Agent
from engine.config.toml import load
from engine.device import CPU
from engine.kernels import grouped as kernels
from engine.kernels.grouped import Product, fault, grouped, one_by_one
from engine.metering.meter import Meter
from engine.model.moe import moe_layer
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import SMALL
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.parallel.thread_axis import ThreadAxis, on_each

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("x", "y"), [(16, 24), (64, 256), (4096, 32)])
@pytest.mark.parametrize("product", [grouped, one_by_one])
def test_this_machines_products_are_right(product: Product, x: int, y: int, dtype: torch.dtype) -> None:
    assert fault(product, x, y, dtype, CPU) == ""


class _Faulty(torch.autograd.Function):
    """A right product whose result, gradient of the rows or weight gradients a fault changes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, offsets: Tensor, change: Any) -> Tensor:
        ctx.save_for_backward(rows, weights, offsets)
        ctx.change = change
        out = one_by_one(rows, weights, offsets)
        change("product", out, rows, offsets, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weights, offsets = ctx.saved_tensors
        with torch.enable_grad():
            inputs = rows.detach().requires_grad_(), weights.detach().requires_grad_()
            found = torch.autograd.grad(one_by_one(*inputs, offsets), inputs, grad)
        for name, one in zip(("rows", "weights"), found, strict=True):
            ctx.change(name, one, rows, offsets, grad)
        return *found, None, None


def empty_groups(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    """pytorch issue 172439: the weight gradients of empty groups are not zero."""
    if name == "weights":
        for group, size in enumerate(offsets.diff(prepend=offsets.new_zeros(1)).tolist()):
            if not size:
                x[group] += 0.01


def uninitialised(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    """Nothing writes the weight gradient of an empty group."""
    if name == "weights":
        x[offsets.diff(prepend=offsets.new_zeros(1)) == 0] = float("nan")


def tail_in_the_last_group(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    """The rows after the last offset count as rows of the last group."""
    if name == "weights" and len(x):
        last = int(offsets[-1])
        x[-1] += rows[last:].T @ grad[last:]


def one_element(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    if name == "product" and len(x) > 50:
        x[50, 3] *= 1.2 if float(x[50, 3].abs()) > 1 else 20


def rows_shifted(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    if name == "rows":
        x.copy_(x.roll(1, 0))


def refuses(name: str, x: Tensor, rows: Tensor, offsets: Tensor, grad: Tensor) -> None:
    if len(rows) == 0:
        raise RuntimeError("strides should be multiple of 16 bytes\nException raised from check")


FAULTS = {
    empty_groups: "the weight gradient of a group of 0 rows is off by 0.0",
    uninitialised: "the weight gradient of a group of 0 rows is off by nan",
    tail_in_the_last_group: "the weight gradient of a group of 9 rows is off by nan",
    one_element: "the product of a group of 64 rows is off by",
    rows_shifted: "the gradient of the rows of a group of 37 rows is off by",
    refuses: "with groups of 0, 0, 0 rows: strides should be multiple of 16 bytes",
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("change", FAULTS)
def test_a_fault_is_found(change: Callable[..., None], dtype: torch.dtype) -> None:
    def product(*given: Tensor) -> Tensor:
        out: Tensor = _Faulty.apply(*given, change)  # type: ignore[no-untyped-call]
        return out

    found = fault(product, 32, 48, dtype, CPU)
    assert found.startswith(FAULTS[change]) and "\n" not in found


def test_all_ranks_change_if_the_kernel_is_wrong_on_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of these ranks says so."""
    this, model = threading.local(), load(DEMO, SMALL).model

    def found(*_: object) -> str:
        return "why" if this.rank in this.wrong else ""

    monkeypatch.setattr(moe_layer, "fault", found)

    def on(wrong: set[int]) -> list[tuple[Product, str]]:
        def work(axis: ThreadAxis) -> tuple[Product, str]:
            this.rank, this.wrong = axis.rank, wrong
            return moe_layer.expert_product(model, torch.float32, CPU, axis)

        return on_each(4, work)

    assert on(set()) == [(grouped, "")] * 4
    first, second, third, fourth = on({1, 3})
    assert first == third == fourth == (one_by_one, "")
    assert second == (
        one_by_one,
        f"rank 1 (and 1 more): grouped_mm of torch {torch.__version__} is wrong on cpu in float32 (why), so all ranks "
        "multiply the rows of each expert by themselves, which is slower",
    )
    assert on({2})[2][1].startswith("rank 2: ")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=single_rank_context(tmp_path).store(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_run_with_a_wrong_kernel_says_so_once_and_trains_the_same(
    group: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, events = load(DEMO, [*SMALL, "train.steps=2", "knobs.capacity_factor=0.5"]), list[Event]()

    class Heard(Agent):
        def send(self, *messages: Any) -> None:
            events.extend(one for one in messages if isinstance(one, Event) and one.level == "warning")

    def loss() -> float:
        meter = Meter(layout.model.layers, 8)
        summary = Trainer(layout, meter, Heard(None, lambda: meter.operation)).run()
        assert summary
        return summary.loss

    right = loss()
    assert not events and not capsys.readouterr().err
    real = torch.nn.functional.grouped_mm
    calls: list[int] = []

    def wrong(rows: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
        calls.append(len(rows))
        return real(rows, weights, offs=offs) * 1.1

    monkeypatch.setattr(kernels.F, "grouped_mm", wrong)
    assert loss() == pytest.approx(right, rel=1e-6)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == events[0].text and len(events) == 1
    assert line.startswith("rank 0: grouped_mm of torch") and "the product of a group of 37 rows" in line
    assert len(calls) == 1  # in the check only
