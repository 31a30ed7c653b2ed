"""Mixture of experts: a router, all-to-alls to the experts and back, and the experts as one grouped GEMM.

Shapes: B sequences, S tokens of this rank's slice, T = B S, D model width, F expert width, E experts, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.sections.model import Model, Moe
from engine.device import device_name
from engine.kernels.grouped import Product, fault, grouped, has_kernel, one_by_one
from engine.metering.meter import Meter
from engine.model.moe.router import ROUTERS, Choice
from engine.model.swiglu import gated_function
from engine.parallel.collectives import Axis
from engine.parallel.expert_all_to_all import Dispatch, Placement, plan_dispatch
from engine.parallel.local_shards import local_weight
from engine.parallel.parameters import ParameterFactory


@dataclass(frozen=True)
class Routing:
    """The router's choice and the dispatch plan of one micro-batch in one layer. The choice and the plan are computed
    once; a recomputed forward pass reuses them."""

    choice: Choice
    dispatch: Dispatch


class Experts(nn.Module):
    """This rank's SwiGLU experts, with stacked weights. Maps rows [R, D], sorted by expert, to [R, D]."""

    def __init__(self, factory: ParameterFactory, name: str, moe: Moe, d_model: int, out_std: float):
        super().__init__()
        self.gate = factory.experts(f"{name}.gate", moe.experts, (d_model, moe.d_expert), 0.02)
        self.up = factory.experts(f"{name}.up", moe.experts, (d_model, moe.d_expert), 0.02)
        self.down = factory.experts(f"{name}.down", moe.experts, (moe.d_expert, d_model), out_std)
        self._gated = gated_function(factory.compiled, any_size=True)
        self._product = factory.grouped

    def forward(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:
        gate = self._product(rows_RD, local_weight(self.gate), offsets)
        up = self._product(rows_RD, local_weight(self.up), offsets)
        return self._product(self._gated(gate, up), local_weight(self.down), offsets)


class SharedExperts(nn.Module):
    """The experts that process every token (Dai et al. 2024), concatenated into one SwiGLU: [T, D] -> [T, D].

    The shared experts are replicated over tp, and each rank applies them to its slice of the sequence. The alternative
    is to shard them over tp, and to gather and scatter the sequence at every micro-batch. Replication needs one
    all-reduce of the shared experts' gradients over tp per step. Replication sends fewer bytes than sharding if the
    number of tokens of a data-parallel rank in a step exceeds 1.5 times the total width of the shared experts
    (docs/evidence/bytes.md).
    """

    def __init__(self, factory: ParameterFactory, name: str, moe: Moe, d_model: int, out_std: float):
        super().__init__()
        width = moe.shared_experts * moe.d_expert
        self.gate = factory.replicated(f"{name}.gate", (width, d_model), 0.02)
        self.up = factory.replicated(f"{name}.up", (width, d_model), 0.02)
        self.down = factory.replicated(f"{name}.down", (d_model, width), out_std)
        self._gated = gated_function(factory.compiled)

    def forward(self, x_TD: Tensor) -> Tensor:
        hidden = self._gated(F.linear(x_TD, self.gate), F.linear(x_TD, self.up))
        return F.linear(hidden, self.down)


def expert_product(
    model: Model, dtype: torch.dtype, device: torch.device, ranks: Axis
) -> tuple[Product, str]:
    """The grouped GEMM for the experts of a run whose weights have `dtype` in the passes: torch's kernel or, if it is
    wrong on a rank, one matmul per expert on all ranks. Also returns a sentence about this for the user, which is
    empty on all ranks except the first on which the kernel is wrong. Collective over `ranks`."""
    if model.moe is None or not has_kernel(device, dtype):
        return grouped, ""
    D, X = model.d_model, model.moe.d_expert
    why = fault(grouped, D, X, dtype, device) or fault(grouped, X, D, dtype, device)
    faults = ranks.all_gather(torch.tensor([bool(why)])).flatten().tolist()
    if not any(faults):
        return grouped, ""
    if ranks.rank != faults.index(True):
        return one_by_one, ""
    more = f" (and {sum(faults) - 1} more)" if sum(faults) > 1 else ""
    return one_by_one, (
        f"rank {ranks.rank}{more}: grouped_mm of torch {torch.__version__} is wrong on {device_name(device)} in "
        f"{str(dtype).removeprefix('torch.')} ({why}), so all ranks multiply the rows of each expert by themselves, "
        "which is slower"
    )


class MoeLayer(nn.Module):
    """Router and experts of one layer: this rank's slice [B, S, D] -> [B, S, D]."""

    def __init__(
        self,
        factory: ParameterFactory,
        layer: int,
        moe: Moe,
        d_model: int,
        out_std: float,
        knob_values: KnobValues,
        meter: Meter,
    ):
        super().__init__()
        self.layer, self.meter = layer, meter
        self.placement = Placement(factory.ep_hops, range(moe.experts), factory.device)
        self.router = ROUTERS[moe.router](factory, f"layers.{layer}.router", moe, d_model, knob_values)
        self.experts = Experts(factory, f"layers.{layer}.experts", moe, d_model, out_std)
        self.shared: SharedExperts | None = None
        if moe.shared_experts:
            self.shared = SharedExperts(factory, f"layers.{layer}.shared", moe, d_model, out_std)

    def set_placement(self, logical: Sequence[int]) -> None:
        """Set which rank holds each expert: slots are numbered by ep rank, then by index on that rank, and
        `logical[slot]` is the expert in a slot. The caller moves the weights."""
        self.placement = Placement(self.placement.hops, logical, self.placement.device)

    def forward(self, x_BSD: Tensor, cache: dict[str, Routing]) -> Tensor:
        """Forward pass. The first forward pass stores its routing in `cache`; a recomputed forward pass reads it from
        there."""
        logits_BSE, scores_BSE = self.router(x_BSD)
        if "routing" not in cache:
            cache["routing"] = self._route(scores_BSE.detach())
        choice, dispatch = cache["routing"].choice, cache["routing"].dispatch
        x_TD = x_BSD.flatten(0, 1)
        sent = dispatch.send(x_TD)
        shared_TD = None if self.shared is None else self.shared(x_TD)  # runs while the rows are being sent
        outputs_ND = dispatch.run(sent, self.experts)
        weights_TK = self.router.pair_weights(scores_BSE, choice) * self.router.moe.route_scale
        out_TD = dispatch.combine(outputs_ND, weights_TK)
        if shared_TD is not None:
            out_TD = out_TD + shared_TD
        return self.router.with_losses(out_TD, logits_BSE, scores_BSE, choice).view_as(x_BSD)

    @torch.no_grad()
    def _route(self, scores_BSE: Tensor) -> Routing:
        choice = self.router.choose(scores_BSE)
        self.meter.routed(self.layer, choice.load_E, choice.dropped)
        plan = plan_dispatch(choice.experts_TK, choice.keep_TK, self.placement, choice.most_rows)
        return Routing(choice, plan)
