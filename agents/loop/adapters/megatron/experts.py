"""Counts the (token, expert) pairs of each layer with hooks on Megatron-LM's routers.

A router returns the probabilities and `routing_map`, a bool tensor [tokens, experts] after tokens are dropped.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agents.loop.adapters.expert_load import LARGE, SPARSE
from agents.loop.adapters.torch_ranks import TorchRanks


class RoutingMaps:
    """The expert load of all layers and ranks. Each rank counts the pairs of its own tokens in its own layers; without
    sequence parallelism, the ranks of a tensor-parallel group have the same tokens, and only the first one counts.

    `captured`: why outputs of the routers cannot be read; "" if they can.
    """

    def __init__(self, model: Sequence[Any], config: Any, mpu: Any, ranks: TorchRanks, captured: str) -> None:
        self._ranks = ranks
        self._experts = 0 if captured else int(config.num_moe_experts or 0)
        self._decoder = int(config.num_layers)  # layers before those of multi-token prediction
        self._layers = self._decoder + int(getattr(config, "mtp_num_layers", None) or 0)
        self._counts: dict[int, Any] = {}  # by layer, on the router's device
        distinct = config.sequence_parallel or mpu.get_tensor_model_parallel_rank() == 0
        routers = [
            one for chunk in model for one in chunk.modules() if type(one).__name__.endswith("TopKRouter")
        ]
        self._hooks = [
            one.register_forward_hook(self._count) for one in routers if self._experts and distinct
        ]

    def total(self, step: int) -> Mapping[int, Sequence[int]]:
        """The load of each layer over all ranks in this step; {} without experts, or if the load of this step is not
        summed. Collective.
        """
        import torch

        counts, self._counts = self._counts, {}
        size = self._layers * self._experts
        if not size or (size > LARGE and step % SPARSE):
            return {}
        own = torch.zeros(self._layers, self._experts, dtype=torch.int64)
        for layer, count in counts.items():
            own[layer] = count.cpu()
        return {layer: load for layer, load in enumerate(self._ranks.sum(own).tolist()) if sum(load)}

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _count(self, router: Any, _: object, output: Any) -> None:
        import torch

        if torch._C._current_graph_task_id() != -1 or not router.training:
            return  # recomputed in a backward, or an evaluation
        layer = router.layer_number - 1 + (self._decoder if getattr(router, "is_mtp_layer", False) else 0)
        new = output[1].detach().sum(dim=0, dtype=torch.int64)
        counts = self._counts.get(layer)
        self._counts[layer] = new if counts is None else counts.add_(new)
