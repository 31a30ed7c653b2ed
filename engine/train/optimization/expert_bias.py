"""Loss-free load balancing: updates each router's bias once per step from the expert load of the whole job (Wang et al.
2024)."""

from collections.abc import Sequence

from torch import Tensor, nn

from engine.model.moe.moe_layer import MoeLayer
from engine.parallel.mesh import World


class LossFreeBalancing:
    """Updates the router biases of a rank's stages, identically on all ranks of a stage. If the routers have no biases,
    this does nothing."""

    def __init__(self, stages: Sequence[nn.Module], world: World):
        self._device = world.device
        # Together these axes contain all ranks that route tokens in these layers.
        self._axes = (world.tp, world.dp, world.replicas)
        self._routers = {
            module.layer: module.router
            for stage in stages
            for module in stage.modules()
            if isinstance(module, MoeLayer) and module.router.bias is not None
        }

    def __call__(self, load_LE: Tensor) -> None:
        """Update every bias. `load_LE` contains, for each layer and expert, how many of this rank's tokens are routed
        to the expert."""
        if not self._routers:
            return
        loads = load_LE[list(self._routers)].to(self._device)
        for axis in self._axes:
            loads = axis.all_reduce(loads)
        for router, load_E in zip(self._routers.values(), loads, strict=True):
            router.update_bias(load_E)
