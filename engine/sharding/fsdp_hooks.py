"""Reductions of FSDP2 gradients: over the ranks of a replica, over micro-batches, and over the replicas.

FSDP2 (torch 2.13) reduces a unit in two calls: first a custom reduce-scatter from a flat gradient into a flat `output`,
then the all-reduce hook with that `output`. The gradients of the unit's parameters become views of `output`. At that
point FSDP2 does not read the values of the gradients (it does not convert the dtype and does not divide), so `output`
may be filled later.

On the CPU (gloo), the reduce-scatter fills `output` in the background, and `GradientReductions` waits for the
reduce-scatter before using the gradients. On CUDA (NCCL), the reduce-scatter is queued on a stream of FSDP2, and
`engine/sharding/cuda_streams.py` synchronises the streams.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from engine.parallel.collectives import AsyncCollective, Axis
from engine.sharding.compression.reductions import Compression, Running, Segment
from engine.sharding.cuda_streams import WriteEvent, keep_for_current_stream, mark_write, wait_for_write
from engine.sharding.fsdp_collectives import AllGather, ReduceScatter

# Number of compressed sums that run at the same time. Each holds a copy of its unit's gradient, and its messages.
COMPRESSED_AT_ONCE = 2


class FsdpUnit:
    """An FSDP unit: modules whose parameters FSDP2 gathers together, and whose gradients it reduces together, over one
    axis."""

    def __init__(self, module: FSDPModule, axis: Axis, reductions: "GradientReductions"):
        self.module = module
        self._reductions = reductions
        self._reduce_scatter: AsyncCollective | None = None
        self.segments: list[Segment] = []
        self.number = 0
        # Call this before setting the divide factor: otherwise FSDP2 uses PREMUL_SUM, which gloo does not support.
        module.set_force_sum_reduction_for_comms(True)
        if axis.size > 1:
            module.set_gradient_divide_factor(1.0)  # with one rank, FSDP2 would divide each gradient by 1
            module.set_custom_all_gather(AllGather(axis))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(ReduceScatter(axis, self._keep_reduce_scatter))  # type: ignore[arg-type]
        module.set_all_reduce_hook(self._on_reduce_scattered)

    def accumulate(self) -> None:
        """Accumulate the gradients of a micro-batch in the reduction dtype, as FSDP2 does after a full backward pass.

        FSDP2 does not do this for the weight gradients of a split backward pass, so autograd would sum them in the
        dtype of the weights. In bf16, the relative error of the sum of 8 micro-batches would then be 2e-3.
        """
        for group in param_groups(self.module):
            for parameter in group.fsdp_params:
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()

    def name(self, number: int, names: Mapping[nn.Parameter, str]) -> None:
        """Set the unit's index to `number`, and record the name and the offset of each parameter in the unit's flat
        gradient."""
        self.number, self.segments = number, []
        start = 0
        for group in param_groups(self.module):
            for sharded in group.fsdp_params:
                shape = tuple(sharded.padded_sharded_param_size)
                parameter = sharded.sharded_param
                self.segments.append(Segment(parameter, names[parameter], start, shape))
                start += prod(shape)

    def finish_gather(self) -> None:
        """Wait for a gather whose weights no forward pass has used. Without this call, the next forward pass would use
        the outdated weights from this gather. For example, validation gathers the averaged weights of all units, but
        does not run the multi-token prediction modules."""
        for group in param_groups(self.module):
            group.wait_for_unshard()

    def end_forward(self) -> None:
        """End a forward pass in which not all modules of the unit ran. For example, validation does not run the experts
        of the multi-token prediction modules. Torch 2.11 does not end such a pass: it would not free the unit, and the
        next forward pass would use the outdated weights."""
        state = self.module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in param_groups(self.module):
            group._training_state = TrainingState.IDLE

    def forget_forwards(self) -> None:
        """Clear FSDP2's record of the forward passes since the last backward pass. FSDP2 uses this record to prefetch
        units in the backward pass. Without this call, FSDP2 would also prefetch for forward passes that have no
        backward pass."""
        for group in param_groups(self.module):
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()

    def _keep_reduce_scatter(self, started: AsyncCollective) -> None:
        self._reduce_scatter = started

    def _on_reduce_scattered(self, output: Tensor) -> None:
        reduce_scatter, self._reduce_scatter = self._reduce_scatter, None
        self._reductions.add(self, output, reduce_scatter)


class GradientReductions:
    """Runs the reductions of a step in the order in which the backward pass starts them; this order is the same on all
    ranks.

    Within a replica, gradients may be reduced after each micro-batch. The sum over all micro-batches is reduced over
    the replicas once.
    """

    def __init__(self, replicas: Axis, compression: Compression | None = None):
        self._replicas = replicas
        self._compression = compression or Compression(replicas)
        self._last = True
        self._unfinished: list[tuple[FsdpUnit, Tensor, AsyncCollective | None, WriteEvent]] = []
        self._to_await: list[AsyncCollective] = []
        self._over_replicas: list[Running] = []
        self._earlier_sums: dict[FsdpUnit, Tensor] = {}  # flat sums of the gradients of earlier micro-batches

    def begin(self, last: bool) -> None:
        """Prepare for a backward pass that reduces gradients: finish the reductions of the previous backward pass, and
        add their gradients to the sums over the earlier micro-batches."""
        while self._unfinished:
            self._store()
        self._last = last

    def add(self, unit: FsdpUnit, output: Tensor, reduce_scatter: AsyncCollective | None) -> None:
        """Add a reduction whose reduce-scatter has just started, and wait for the reduce-scatter before it. So at most
        two reduce-scatters, the new one and the one before, hold buffers at the same time. The gradients of the one
        before are added to those of earlier micro-batches, so that a rank keeps only one copy of the gradients of its
        shard."""
        finish = self._sum_replicas if self._last else self._store
        if self._unfinished:
            finish()  # one by one, because all ranks must start these sums in the same order
        while self._to_await:  # wait for these before the next unit allocates its buffers
            self._to_await.pop(0).wait()
        self._unfinished.append((unit, output, reduce_scatter, mark_write(output)))
        if reduce_scatter is None or not reduce_scatter.in_background:
            finish()

    def _store(self) -> None:
        """Wait for the oldest reduction that has not finished, and add its gradient to the sum over the earlier
        micro-batches."""
        unit, output, reduce_scatter, written = self._unfinished.pop(0)
        if reduce_scatter:
            reduce_scatter.wait()
        wait_for_write(written)
        self._add_earlier(unit, output)
        self._earlier_sums[unit] = output

    def _add_earlier(self, unit: FsdpUnit, output: Tensor) -> None:
        if unit in self._earlier_sums:
            earlier = self._earlier_sums.pop(unit)
            output += earlier
            # The earlier sum may have been allocated on another stream than this one.
            keep_for_current_stream(earlier)

    def _sum_replicas(self) -> None:
        unit, output, reduce_scatter, _ = self._unfinished.pop(0)
        if reduce_scatter and (self._replicas.size > 1 or unit in self._earlier_sums):
            reduce_scatter.wait()
            reduce_scatter = None
        self._add_earlier(unit, output)
        if reduce_scatter:
            self._to_await.append(reduce_scatter)
        elif self._replicas.size > 1:
            if self._compression.values.method != "none":
                while len(self._over_replicas) >= COMPRESSED_AT_ONCE:
                    self._advance()
            self._over_replicas.append(self._compression.start(unit.number, unit.segments, output))

    def complete(self) -> None:
        """Wait until all gradients are complete."""
        while self._unfinished:
            self._sum_replicas()
        for started in self._to_await:
            started.wait()
        self._to_await.clear()
        while self._over_replicas:
            self._advance()

    def _advance(self) -> None:
        """Wait for the current collective of each sum over the replicas, and start its next one. A compressed sum takes
        several collectives. The collectives of the units alternate, in the same order on all ranks."""
        self._over_replicas = [running for running in self._over_replicas if not running.advance()]


def param_groups(module: FSDPModule) -> Sequence[Any]:
    """FSDP2's parameter groups of `module`. FSDP2 stores them in a list; older versions of torch store
    one group or None."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []
