"""Counts the token-expert pairs of each layer with hooks on a model's routers.

A router is a module whose class name ends in "Router" (`MixtralTopKRouter`, `Qwen3MoeTopKRouter`, ...) and whose output
contains the indices of the chosen experts as integers. For DeepSpeed, the hooks are set on each `MOELayer`; the
layer's `exp_counts` contains the counts of its last forward pass, including tokens that are then dropped.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agents.loop.adapters.torch_ranks import TorchRanks
from agents.loop.step import StepReport

if TYPE_CHECKING:
    from torch import Tensor

LARGE = 4096  # above this number of counts (layers times experts), loads are summed only every SPARSE steps
SPARSE = 20
EXCHANGED = (
    16384  # up to this number of counts, of all ranks together, loads are summed in the exchange of the step
)

# Names that the attribute of a router with its number of experts may have.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


class ExpertLoad:
    """The expert load of a model. The hooks count only in training mode, and not while activations are recomputed."""

    def __init__(self, model: Any, ranks: TorchRanks) -> None:
        routers = list(_routers(model))
        self._ranks = ranks
        self._experts = [experts for _, _, experts in routers]
        self._layers = layer_numbers([name for name, _, _ in routers])
        # By router number: the pairs of each expert, on the router's device.
        self._counts: dict[int, Tensor] = {}
        self._hooks = [
            router.register_forward_hook(self._hook(number)) for number, (_, router, _) in enumerate(routers)
        ]

    def total(self, step: int) -> Mapping[int, Sequence[int]]:
        """Each layer's expert load since the last call, summed over all ranks; {} if the model has no routers. For a
        large model, returns {} except at every `SPARSE`-th step. This call is a collective.
        """
        own = self._own(step)
        return {} if own is None else self._by_layer(self._ranks.sum(own))

    def report(self, report: StepReport) -> None:
        """Report each layer's expert load in this step, summed over all ranks. If there are few counts, they are summed
        in the exchange at the end of the step; otherwise they are summed in this call, which is then a collective.
        """
        own = self._own(report.number)
        if own is None:
            return
        if len(own) * self._ranks.world <= EXCHANGED:
            report.report_own_experts(self._by_layer(own))
        else:
            report.report_experts(self._by_layer(self._ranks.sum(own)))

    def _own(self, step: int) -> "Tensor | None":
        """The number of token-expert pairs on this rank since the last call, by router and expert, as a CPU tensor.
        None if the model has no routers, or if the model is large and the expert load of this step is not summed over
        the ranks.
        """
        import torch

        counts, self._counts = self._counts, {}
        if not self._hooks or (sum(self._experts) > LARGE and step % SPARSE):
            return None
        return torch.cat(
            [
                counts[number].cpu() if number in counts else torch.zeros(experts, dtype=torch.int64)
                for number, experts in enumerate(self._experts)
            ]
        )

    def _by_layer(self, pairs: "Tensor") -> dict[int, list[int]]:
        import torch

        parts = torch.split(pairs, self._experts)
        return {layer: load.tolist() for layer, load in zip(self._layers, parts, strict=True)}

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, number: int) -> Callable[[Any, Any, Any], None]:
        import torch

        def count(router: Any, _: object, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1 or not router.training:
                return  # recomputed in a backward pass, or an evaluation
            new = _counts(router, output, self._experts[number])
            if new is None:
                return
            counts = self._counts.get(number)
            self._counts[number] = new if counts is None else counts.add_(new)

        return count


def moe_layers(model: Any) -> Iterator[Any]:
    """The DeepSpeed MoE layers of a model."""
    return (module for module in model.modules() if _is_moe_layer(module))


def _routers(model: Any) -> Iterator[tuple[str, Any, int]]:
    """The name, the module and the number of experts of each router."""
    for name, module in model.named_modules():
        experts = next((getattr(module, one) for one in EXPERTS if hasattr(module, one)), None)
        named = type(module).__name__.endswith("Router") and hasattr(module, "top_k")
        if _is_moe_layer(module):
            named, experts = True, module.ep_size * module.num_local_experts
        if named and isinstance(experts, int) and experts > 0:
            yield name, module, experts


def _is_moe_layer(module: Any) -> bool:
    return type(module).__name__ == "MOELayer" and hasattr(module, "num_local_experts")


def layer_numbers(names: Sequence[str]) -> list[int]:
    """The layer number in each router's name, such as 3 in ``model.layers.3.mlp.gate``. If a name has no number, or if
    two names have the same number, the routers are numbered from 0 instead.
    """
    found = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    layers = [int(match[1]) for match in found if match]
    return layers if len(set(layers)) == len(names) else list(range(len(names)))


def _counts(router: Any, output: Any, experts: int) -> "Tensor | None":
    """The number of token-expert pairs of each expert in a router's last forward pass, as a new tensor; None if
    unknown.
    """
    import torch

    if _is_moe_layer(router):
        own = getattr(router, "exp_counts", None)
        if not isinstance(own, torch.Tensor) or own.numel() != experts:
            return None
        return own.detach().reshape(-1).to(torch.int64, copy=True)
    indices = _indices(output, router.top_k)
    if indices is None:
        return None
    chosen = indices.detach().reshape(-1)
    if not chosen.is_cuda:
        return torch.bincount(chosen, minlength=experts)
    chosen = chosen.long()
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(
        0, chosen, torch.ones_like(chosen)
    )  # unlike bincount, does not wait for the GPU


def _indices(output: Any, top_k: int) -> "Tensor | None":
    """The indices of the chosen experts: the integer tensor of shape [..., top_k] in a router's output."""
    import torch

    parts = output if isinstance(output, tuple | list) else (output,)
    whole = (
        one for one in parts if isinstance(one, torch.Tensor) and one.dtype in (torch.int32, torch.int64)
    )
    return next((one for one in whole if one.dim() and one.shape[-1] == top_k), None)
