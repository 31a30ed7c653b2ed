"""For parity cases in bf16, replaces the routers' choice of experts with a choice that rounding errors cannot
change."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.moe.router import Choice, Router
from engine.sharding.expert_rows import moe_layers


def fix_routing(stages: Sequence[nn.Module]) -> None:
    """Select each token's experts by the position of the token in its sequence, in the same way in every layout. The
    weights of the chosen experts and the auxiliary losses still depend on the scores.

    In bf16, rounding changes the choice between almost equal scores at every step, and this would hide other errors.
    """
    for n, layer in moe_layers(stages).items():
        router = layer.router

        def choose(scores_BSE: Tensor, n: int = n, router: Router = router) -> Choice:
            B, S, E = scores_BSE.shape
            by_place = torch.rand(S * router.slices.count, E, generator=torch.Generator().manual_seed(n))
            by_place = by_place.to(scores_BSE.device)
            return type(router).choose(router, router.slices.own_slice(by_place.expand(B, -1, -1)))

        router.choose = choose
