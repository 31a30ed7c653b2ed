"""Routing that rounding cannot change, for parity in bf16."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.model.router import Choice, Router
from engine.sharding.expert_rows import moe_layers


def fix_routing(stages: Sequence[nn.Module]) -> None:
    """Let a token's place in its sequence choose its experts, in whatever layout; weights and losses stay as scored.

    In bf16 some near-tie breaks the other way at every step, and what that does hides all else.
    """
    for n, layer in moe_layers(stages).items():
        router = layer.router

        def choose(scores_BSE: Tensor, n: int = n, router: Router = router) -> Choice:
            B, S, E = scores_BSE.shape
            by_place = torch.rand(S * router.slices.count, E, generator=torch.Generator().manual_seed(n))
            return type(router).choose(router, router.slices.own_slice(by_place.expand(B, -1, -1)))

        router.choose = choose
