"""What FSDP2 gathers and reduces, unit by unit, through the metered door, started here and awaited where it is needed.

On gloo FSDP2 itself waits for each collective. Here a gather is started and awaited when its unit runs, and a reduction
is started and awaited before its gradients are next touched, so that both hide behind computation. On NCCL FSDP2 does
that by streams of its own, and the door only meters.

FSDP2 (torch 2.13) reduces a unit in two calls: a custom reduce-scatter from a flat gradient into a flat `output`, then
the all-reduce hook with that `output`. The unit's gradients become views of `output`, unread as long as they are new
(the reduction keeps its dtype and divides by 1), so `output` may be filled in later.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from engine.parallel.collectives import AsyncCollective, Axis
from engine.sharding.fsdp_collectives import AllGather, ReduceScatter


class FsdpUnit:
    """One module that FSDP2 gathers and reduces as a whole, on its axis."""

    def __init__(self, module: FSDPModule, axis: Axis, reductions: "GradientReductions"):
        self.module = module
        self._reductions = reductions
        self._scattering: AsyncCollective | None = None
        module.set_force_sum_reduction_for_comms(True)  # before the factor: gloo has no PREMUL_SUM
        module.set_gradient_divide_factor(1.0)
        if axis.size > 1:
            module.set_custom_all_gather(AllGather(axis))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceScatter(axis, self._scatter))  # type: ignore[arg-type]
        module.set_all_reduce_hook(self._scattered)

    def accumulate(self) -> None:
        """Add a micro-batch's gradients to sums in the type they are reduced in, as FSDP2 does after a whole backward.

        It does not see weight gradients that a schedule computes by themselves, and torch adds those up in the type of
        the weights: in bf16, 8 micro-batches are off by 2e-3.
        """
        for group in param_groups(self.module):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def _scatter(self, started: AsyncCollective) -> None:
        self._scattering = started

    def _scattered(self, output: Tensor) -> None:
        scattering, self._scattering = self._scattering, None
        self._reductions.add(self, output, scattering)


class GradientReductions:
    """The reductions of a step, in the order in which backward starts them, the same on every rank.

    Within a replica each micro-batch may be reduced; over the replicas what all micro-batches amount to, once.
    """

    def __init__(self, replicas: Axis):
        self._replicas = replicas
        self._last = True
        self._scattering: list[tuple[FsdpUnit, Tensor, AsyncCollective | None, torch.cuda.Event | None]] = []
        self._summing: list[AsyncCollective] = []
        self._before: dict[FsdpUnit, Tensor] = {}  # flat sums of earlier micro-batches

    def begin(self, last: bool) -> None:
        """Before a backward that reduces: the gradients of the one before are awaited and kept apart from its own."""
        for unit, output, scattering, enqueued in self._scattering:
            if scattering:
                scattering.wait()
            if enqueued:
                enqueued.wait()
            self._before[unit] = output + self._before[unit] if unit in self._before else output
        self._scattering.clear()
        self._last = last

    def add(self, unit: FsdpUnit, output: Tensor, scattering: AsyncCollective | None) -> None:
        if self._last and self._scattering:
            self._sum_replicas()  # one after the other: every rank must start these in the same order
        self._scattering.append((unit, output, scattering, _enqueued(output)))
        if self._last and scattering is None:
            self._sum_replicas()

    def _sum_replicas(self) -> None:
        unit, output, scattering, _ = self._scattering.pop(0)
        if scattering and (self._replicas.size > 1 or unit in self._before):
            scattering.wait()
            scattering = None
        if unit in self._before:
            before = self._before.pop(unit)
            output += before
            if before.is_cuda:  # made on the stream of computation, and FSDP2 reduces on another
                before.record_stream(torch.cuda.current_stream())
        if scattering:
            self._summing.append(scattering)
        elif self._replicas.size > 1:
            self._summing.append(self._replicas.start_all_reduce(output))

    def complete(self) -> None:
        """Wait until every gradient is whole."""
        while self._scattering:
            self._sum_replicas()
        for started in self._summing:
            started.wait()
        self._summing.clear()


def _enqueued(x: Tensor) -> torch.cuda.Event | None:
    """On CUDA, what a stream waits for before it may read `x`, which the current stream writes.

    FSDP2 has computation wait for its reductions after the last backward only.
    """
    return torch.cuda.current_stream().record_event() if x.is_cuda else None


def param_groups(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's own record of what it gathers and reduces of `module`: a list, in older torch one or None."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
