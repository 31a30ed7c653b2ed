"""Checks at the start of a run that the installed torch's FSDP2 reduces gradients as the engine expects.

`engine/sharding/fsdp_hooks.py` relies on undocumented behaviour that has changed between versions: the reduce-scatter
may write its output after FSDP2 has made the parameters' gradients views of this output, gradients are reduced to sums
and not to means, and bf16 gradients are summed in fp32. If one of these assumptions were wrong, training would silently
continue with wrong gradients. The check runs a tiny step with known gradients.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engine.parallel.collectives import Axis
from engine.sharding.fsdp_hooks import FsdpUnit, GradientReductions

# Gradients of three micro-batches. In bf16 256 + 1 is 256.
MICRO_BATCHES = (256.0, 1.0, 1.0)
ROWS = 3  # rows of the weight: an odd number, so that shards are uneven and padding is tested too

# Errors that are raised if the installed torch has different names or arguments.
INCOMPATIBLE = (AttributeError, TypeError, AssertionError)


class _Product(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, ROWS + 1, device=device).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def probe(
    mesh: DeviceMesh, axis: Axis, replicas: Axis, policy: MixedPrecisionPolicy, device: torch.device
) -> None:
    """Raise RuntimeError if gradients are not reduced correctly over `axis` and `replicas`."""
    try:
        why = _difference(mesh, axis, replicas, policy, device)
    except INCOMPATIBLE as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        raise RuntimeError(
            f"torch {torch.__version__} does not reduce sharded gradients as the engine needs ({why}); "
            "install torch 2.13"
        )


def _difference(
    mesh: DeviceMesh, axis: Axis, replicas: Axis, policy: MixedPrecisionPolicy, device: torch.device
) -> str:
    """A description of the first value that differs from the expected one, or an empty string if all values match.

    The three micro-batches test a split backward pass, a backward pass without reduction, and a backward pass with
    reduction.
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
    return f"a gradient is {wrong[0]:g} instead of {right:g}" if wrong else ""
