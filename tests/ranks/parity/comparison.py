"""Computes the differences between two traces, and defines the tolerances that `tests/ranks/parity/__main__.py`
explains."""

from itertools import accumulate
from typing import Any

import torch

from tests.ranks.cases.case import Case
from tests.ranks.parity.one_process import ROUNDED
from tests.ranks.parity.trace import Trace

MARGIN = {"fp32": 8.0, "bf16": 2.0, "fp16": 2.0}
FP64_TOLERANCE = 1e-11
# Tolerances for runs in which about one token in a few thousand goes to another expert.
FLIPPED = {"loss": 1e-3, "norm": 1e-2}
# Relative size of one fp32 rounding: a result may differ by this much even if all reference runs are equal.
ROUND_ONCE = 2.0**-23


def assert_equal_except_for_rounding(case: Case, result: dict[str, Any], steps: int) -> None:
    """Raises AssertionError if a case's run of `steps` steps differs from the reference run by more than rounding
    explains: if the difference of a loss, a gradient norm, a gradient or an averaged weight is larger than its
    tolerance, or if tokens go to other experts in a case that does not allow this. `result` is the content of the
    case's `result.json`, which lists these differences."""
    same, precision = result["same_routing"], case.layout.train.precision
    assert len(result["losses"]) == steps
    assert same == steps or not (case.fp64 or precision in ROUNDED), "routed differently"
    for what, distances in result["distance"].items():
        if case.fp64:
            assert max(distances) < FP64_TOLERANCE, (what, distances)
            continue
        # Because | |a| - |b| | <= |a - b|, the norm may differ by as much as the gradients.
        so_far = accumulate(result["rounding"]["loss" if what == "loss" else "gradient"], max)
        allowed = [MARGIN[precision] * max(rounding, ROUND_ONCE) for rounding in so_far]
        over = [(d, a) for d, a in zip(distances[:same], allowed[:same], strict=True) if d > a]
        assert not over, (what, over)
        assert max(distances[same:], default=0.0) < FLIPPED.get(what, float("inf")), (what, distances)


def distance(a: Trace, b: Trace) -> dict[str, list[float]]:
    """Relative differences by step: of the loss, of the gradient norm, and of the parameter gradient that differs most.
    If the runs average their weights, the result also contains the largest relative difference of an averaged weight
    tensor after the last step.

    A gradient's difference is divided by the norm of that gradient, or by 1e-3 of the norm of all gradients together if
    this is larger. The rounding error of a sum is relative to its terms, so a gradient whose terms almost cancel has a
    large error relative to its own norm.
    """
    assert all(x.keys() == y.keys() for x, y in zip(a.grads, b.grads, strict=True)), "other parameters"
    assert a.averages.keys() == b.averages.keys(), "other averages"
    found = {
        "loss": [abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)],
        "norm": [abs(x - y) / abs(y) for x, y in zip(a.norms, b.norms, strict=True)],
        "gradient": [
            max(float((x[n] - y[n]).norm() / y[n].norm().clamp_min(1e-3 * norm)) for n in y)
            for x, y, norm in zip(a.grads, b.grads, b.norms, strict=True)
        ],
    }
    if b.averages:
        whole = torch.stack([x.norm() for x in b.averages.values()]).norm()
        found["average"] = [
            max(
                float((a.averages[n] - x).norm() / x.norm().clamp_min(1e-3 * whole))
                for n, x in b.averages.items()
            )
        ]
    return found


def same_routing(a: Trace, b: Trace) -> int:
    """The number of steps before the first step in which expert loads or biases differ between the two runs."""
    same = [
        torch.equal(load, other) and all(torch.equal(mine[n], theirs[n]) for n in theirs)
        for load, other, mine, theirs in zip(a.loads, b.loads, a.biases, b.biases, strict=True)
    ]
    return same.index(False) if False in same else len(same)
