"""A tiny step at start, whose gradient is known: does this torch's FSDP2 do what `reduction.py` relies on?

That is not documented and has changed between versions: a flat gradient that is filled in after FSDP2 took it, sums
and not means, and fp32 sums of bf16 gradients. Where one does not hold, training would go on with wrong gradients.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.parallel.collectives import Axis
from engine.sharding.gradient_reductions import FsdpUnit, GradientReductions

# Gradients of three micro-batches. In bf16 256 + 1 is 256.
MICRO_BATCHES = (256.0, 1.0, 1.0)
ROWS = 3  # of the weight: not the same number on each rank, so that padding is seen too

OTHERWISE = (AttributeError, TypeError, AssertionError)  # names, arguments and states of another version


class _Product(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, ROWS + 1, device=device).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def probe(
    mesh: DeviceMesh, axis: Axis, replicas: Axis, policy: MixedPrecisionPolicy, device: torch.device
) -> None:
    """RuntimeError, one sentence, where gradients over `axis` and `replicas` come out wrong."""
    try:
        why = _difference(mesh, axis, replicas, policy, device)
    except OTHERWISE as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise RuntimeError(
            f"torch {torch.__version__} reduces sharded gradients in another way than the engine needs ({why}); "
            "install torch 2.13"
        )


def _difference(
    mesh: DeviceMesh, axis: Axis, replicas: Axis, policy: MixedPrecisionPolicy, device: torch.device
) -> str:
    """What is wrong, empty if nothing is.

    The three micro-batches: weight gradients computed apart, a backward that is not reduced, a backward that is.
    """
    module = _Product(device)
    fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy)
    assert isinstance(module, FSDPModule)
    reductions = GradientReductions(replicas)
    unit = FsdpUnit(module, axis, reductions)
    ranks = axis.size * replicas.size
    split, kept, last = (torch.tensor(x, device=device) for x in MICRO_BATCHES)

    module.set_is_last_backward(False)
    module.set_requires_gradient_sync(False)
    module.set_reshard_after_backward(False)
    out = module(split)
    if float(out.detach()) != MICRO_BATCHES[0] * ROWS * (ROWS + 1) / 2:
        return "gathered parameters are wrong"
    weight = module.weight
    (weight.grad,) = torch.autograd.grad(out, weight)
    unit.accumulate()
    module(kept).backward()
    module.set_is_last_backward(True)
    module.set_requires_gradient_sync(True)
    module.set_reshard_after_backward(True)
    reductions.begin(last=True)
    module(last).backward()
    reductions.complete()

    grad = module.weight.grad
    assert isinstance(grad, DTensor)
    right = ranks * sum(MICRO_BATCHES)
    wrong = [x for x in grad.to_local().flatten().tolist() if x != right]
    return f"a gradient that is {right:g} came out as {wrong[0]:g}" if wrong else ""
