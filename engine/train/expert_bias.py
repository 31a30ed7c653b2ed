"""Loss-free balancing: each router's bias follows the load of the whole job, once a step (Wang et al. 2024)."""

from collections.abc import Sequence

from torch import Tensor, nn

from engine.model.moe import MoeLayer
from engine.parallel.mesh import World


class Balancing:
    """The biases of a rank's stages. Every rank of a pipeline stage nudges them alike; nothing to do without biases."""

    def __init__(self, stages: Sequence[nn.Module], world: World):
        self._device = world.device
        # Between them, all ranks that route tokens at these layers.
        self._axes = (world.tp, world.dp, world.replicas)
        self._routers = {
            module.layer: module.router
            for stage in stages
            for module in stage.modules()
            if isinstance(module, MoeLayer) and module.router.bias is not None
        }

    def __call__(self, load_LE: Tensor) -> None:
        """Nudge every bias by a step's load: the pairs of this rank's tokens, counted once a logical forward."""
        if not self._routers:
            return
        loads = load_LE[list(self._routers)].to(self._device)
        for axis in self._axes:
            loads = axis.all_reduce(loads)
        for router, load_E in zip(self._routers.values(), loads, strict=True):
            router.update_bias(load_E)
