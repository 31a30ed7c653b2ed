"""Counts the token-expert pairs of each layer with hooks on Megatron-LM's routers.

A router returns the probabilities and a bool tensor [tokens, experts] of the pairs that it keeps. If experts have a
capacity, the router calls `apply_router_token_dropping` with a bool tensor of all chosen pairs, including the pairs to
drop. If experts are also padded to their capacity, the tensor that the router returns contains pairs that no
token has chosen.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from agents.loop.adapters.expert_load import LARGE, SPARSE
from agents.loop.adapters.patches import Patches
from agents.loop.adapters.torch_ranks import TorchRanks
from agents.loop.step import StepReport

DROPPING = "apply_router_token_dropping"


class RoutingMaps:
    """The expert load of all layers and ranks. Each rank counts the token-expert pairs of its own tokens in its own
    layers; without sequence parallelism, the ranks of a tensor-parallel group have the same tokens, and only the first
    rank counts them.

    `captured`: why the hooks cannot read the routers' outputs; "" if they can.
    """

    def __init__(
        self,
        model: Sequence[Any],
        config: Any,
        mpu: Any,
        ranks: TorchRanks,
        patches: Patches,
        captured: str,
    ) -> None:
        self._ranks = ranks
        self._experts = 0 if captured else int(config.num_moe_experts or 0)
        self._limited = config.moe_expert_capacity_factor is not None
        self._decoder = int(config.num_layers)  # layers before those of multi-token prediction
        self._layers = self._decoder + int(getattr(config, "mtp_num_layers", None) or 0)
        # By layer, on the router's device: the pairs of each expert, and at the end the dropped pairs of all.
        self._counts: dict[int, Any] = {}
        self._chosen: Any = None  # all pairs of the router whose forward pass is running
        distinct = config.sequence_parallel or mpu.get_tensor_model_parallel_rank() == 0
        routers = [
            one for chunk in model for one in chunk.modules() if type(one).__name__.endswith("TopKRouter")
        ]
        self._hooks = [
            router.register_forward_hook(partial(self._count, layer))
            for router in routers
            if self._experts and distinct and (layer := self._layer(router)) is not None
        ]
        for module in {sys.modules[type(one).__module__] for one in routers}:
            if hasattr(module, DROPPING):
                patches.wrap(module, DROPPING, self._note_chosen)

    def _layer(self, router: Any) -> int | None:
        """The index of a router's layer in the model, from 0; None if it is unknown."""
        if router.layer_number is None:
            return None
        layer = int(router.layer_number) - 1
        layer += self._decoder if getattr(router, "is_mtp_layer", False) else 0
        return layer if layer < self._layers else None

    def report(self, report: StepReport) -> None:
        """Report each layer's expert load in this step, summed over all ranks. Does nothing if the model has no
        experts. For a large model, the load is reported only every `SPARSE` steps. This call is a collective.
        """
        import torch

        counts, self._counts = self._counts, {}
        size = self._layers * self._experts
        if not size or (size > LARGE and report.number % SPARSE):
            return
        own = torch.zeros(self._layers, self._experts + 1, dtype=torch.int64)
        for layer, count in counts.items():
            own[layer] = count.cpu()
        rows = {layer: row for layer, row in enumerate(self._ranks.sum(own).tolist()) if sum(row)}
        dropped = {layer: row[-1] for layer, row in rows.items()} if self._limited else None
        report.report_experts({layer: row[:-1] for layer, row in rows.items()}, dropped)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _note_chosen(
        self, original: Callable[..., Any], probs: Any, chosen: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._chosen = chosen.detach()
        return original(probs, chosen, *args, **kwargs)

    def _count(self, layer: int, router: Any, _: object, output: Any) -> None:
        import torch

        chosen, self._chosen = self._chosen, None
        if torch._C._current_graph_task_id() != -1 or not router.training:
            return  # recomputed in a backward pass, or an evaluation
        kept = output[1].detach()
        if kept.dtype != torch.bool or kept.shape[-1] != self._experts:
            return  # a router for inference returns indices
        if chosen is None:
            chosen = kept
        load = chosen.sum(dim=0, dtype=torch.int64)
        dropped = (chosen & ~kept).sum(dtype=torch.int64)
        new = torch.cat([load, dropped.reshape(1)])
        counts = self._counts.get(layer)
        self._counts[layer] = new if counts is None else counts.add_(new)
