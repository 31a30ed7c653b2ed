"""Routers: token choice (top-k, with groups and bias) and expert choice.

All counts are over whole sequences, even if the slices of a sequence are on several ranks. So choices, drops, losses
and gradients are the same in every layout. Ties are resolved in favour of the lower expert index or the earlier
position.

Shapes: B sequences, S tokens of this rank's slice, T = B S, W tokens of a whole sequence, D model width, E experts, K
top-k, G groups of experts, C capacity. A pair is a token and an expert to which the token is routed.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.sections.model import Moe
from engine.config.sizes import expert_capacity
from engine.kernels.precision import at_least_fp32
from engine.kernels.softmax import softmax
from engine.model.moe.balancing_losses import attach_loss, sequence_balance, updated_bias, z_loss
from engine.model.moe.token_dropping import WITHIN_CAPACITY, among_highest, highest, in_half
from engine.parallel.parameters import ParameterFactory


@dataclass(frozen=True)
class Choice:
    """The routing of one micro-batch. The routing is computed once, and a recomputed forward pass reuses it."""

    experts_TK: Tensor  # candidate experts of each token: its top-k, or all of them under expert choice
    keep_TK: Tensor | None  # the token-expert pairs that are not dropped; None = all
    load_E: Tensor  # token-expert pairs per expert, over this rank's tokens, with dropped pairs
    dropped: Tensor  # number of pairs dropped because their expert is over capacity
    most_rows: int | None  # upper bound on the pairs that are not dropped, from the capacity; None = all
    # Returns the number of tokens of a whole sequence that chose each expert, [B, E], for the auxiliary loss. The first
    # call waits for the counts of other ranks. None: no auxiliary loss.
    chosen_BE: Callable[[], Tensor] | None


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": softmax,
    "sigmoid": torch.sigmoid,
}


class Router(nn.Module, ABC):
    """Scores tokens for experts and chooses (token, expert) pairs. `pair_weights` and `with_losses` propagate
    gradients; `choose` does not."""

    bias: Tensor | None

    def __init__(self, factory: ParameterFactory, name: str, moe: Moe, d_model: int, knob_values: KnobValues):
        super().__init__()
        self.moe, self.knob_values, self.slices = moe, knob_values, factory.slices
        self.weight = factory.replicated(name, (moe.experts, d_model), 0.02)
        bias = (
            at_least_fp32(torch.zeros(moe.experts, device=factory.device)) if "bias" in moe.balances else None
        )
        self.register_buffer("bias", bias)  # the bias is a buffer, so that checkpoints contain it
        self._score = factory.compiled(SCORES[moe.score])
        self._balance, self._z_loss = factory.compiled(sequence_balance), factory.compiled(z_loss)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and scores of each token, both [B, S, E], in at least fp32."""
        logits_BSE = F.linear(at_least_fp32(x_BSD), at_least_fp32(self.weight))
        return logits_BSE, self._score(logits_BSE)

    @abstractmethod
    def choose(self, scores_BSE: Tensor) -> Choice:
        """Choose the (token, expert) pairs. The choice depends on whole sequences, parts of which may be on other
        ranks."""

    @abstractmethod
    def pair_weights(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        """The weights with which the expert outputs of each token are summed, [T, K]."""

    def with_losses(self, out_TD: Tensor, logits_BSE: Tensor, scores_BSE: Tensor, choice: Choice) -> Tensor:
        """Return `out_TD` unchanged; backward adds the gradients of the auxiliary loss and the z-loss. In evaluation
        mode no loss is added, so single tokens can be routed without the rest of their sequence."""
        if not self.training:
            return out_TD
        whole, knob_values = self._whole(scores_BSE), self.knob_values
        scale = knob_values.aux_scale * knob_values.loss_scale
        if choice.chosen_BE is not None:
            share_BE = choice.chosen_BE() / (whole * self.moe.top_k)
            aux = self._balance(scores_BSE, share_BE, whole)
            out_TD = attach_loss(out_TD, aux, knob_values.aux_loss_coef * scale)
        if knob_values.z_loss_coef:
            out_TD = attach_loss(out_TD, self._z_loss(logits_BSE, whole), knob_values.z_loss_coef * scale)
        return out_TD

    @torch.no_grad()
    def update_bias(self, load_E: Tensor) -> None:
        """Update the bias from the load of a step, summed over all ranks."""
        if self.bias is not None:
            self.bias.copy_(updated_bias(self.bias, load_E, self.knob_values.bias_rate))

    def _capacity(self, factor: float, whole: int) -> int:
        return expert_capacity(factor, whole, self.moe.top_k, self.moe.experts)

    def _whole(self, x_BSE: Tensor) -> int:
        return x_BSE.shape[1] * self.slices.count


class TokenChoice(Router):
    """Each token chooses its K best experts (Shazeer et al. 2017). If `top_groups` is set, the token chooses them only
    from its best groups of experts.

    The bias affects the choice but not the weight (Wang et al. 2024).
    """

    @torch.no_grad()
    def choose(self, scores_BSE: Tensor) -> Choice:
        biased_BSE = scores_BSE if self.bias is None else scores_BSE + self.bias
        top_BSK = highest(self._in_best_groups(biased_BSE), self.moe.top_k)
        chosen_BSE = torch.zeros_like(scores_BSE, dtype=torch.int32).scatter_(-1, top_BSK, 1)
        whole, keep_TK, total_BE, most = self._whole(scores_BSE), None, None, None
        dropped = torch.zeros((), dtype=torch.int64, device=scores_BSE.device)
        if self.knob_values.capacity_factor is not None:
            capacity = self._capacity(self.knob_values.capacity_factor, whole)
            within_BSE, total_BE = WITHIN_CAPACITY[self.moe.drop](
                self.slices, chosen_BSE, scores_BSE, capacity
            )
            keep_TK = within_BSE.gather(-1, top_BSK).flatten(0, 1)
            most = _most_rows(scores_BSE, capacity)
            dropped = (~keep_TK).sum()
        chosen_BE = None
        if "aux" in self.moe.balances and self.training:
            chosen_BE = self._pairs_by_expert(scores_BSE, chosen_BSE, total_BE)
        return Choice(top_BSK.flatten(0, 1), keep_TK, chosen_BSE.sum((0, 1)), dropped, most, chosen_BE)

    def pair_weights(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        top_TK = scores_BSE.flatten(0, 1).gather(1, choice.experts_TK)
        if self.moe.top_k == 1:  # do not normalise: p / p = 1 would have no gradient to the router
            return top_TK
        return top_TK / top_TK.sum(-1, keepdim=True)

    def _pairs_by_expert(
        self, scores_BSE: Tensor, chosen_BSE: Tensor, total_BE: Tensor | None
    ) -> Callable[[], Tensor]:
        """Returns a function that returns, for each sequence, the number of tokens that chose each expert, [B, E]. If
        the router has a bias, the counts use the K experts that the token would choose without the bias and without
        groups (DeepSeek-V3 2024, eq. 18). The ranks that share a sequence exchange their counts while the layer sends
        its rows to the experts."""
        if self.bias is not None:
            top_BSK = highest(scores_BSE, self.moe.top_k)
            chosen_BSE, total_BE = torch.zeros_like(chosen_BSE).scatter_(-1, top_BSK, 1), None
        return self.slices.start_totals(chosen_BSE) if total_BE is None else lambda: total_BE

    def _in_best_groups(self, biased_BSE: Tensor) -> Tensor:
        """Set scores outside a token's best groups to minus infinity. The score of a group is the sum of its
        K / top_groups best expert scores (DeepSeek-V3 2024, section 2.1.2; in DeepSeek-V2 2024 it is only the best
        score)."""
        moe = self.moe
        if moe.top_groups is None or moe.top_groups == moe.groups:
            return biased_BSE
        B, S, _ = biased_BSE.shape
        groups_BSGe = biased_BSE.view(B, S, moe.groups, -1)
        group_scores_BSG = groups_BSGe.topk(math.ceil(moe.top_k / moe.top_groups)).values.sum(-1)
        best = torch.zeros_like(group_scores_BSG, dtype=torch.bool).scatter_(
            -1, highest(group_scores_BSG, moe.top_groups), True
        )
        return groups_BSGe.masked_fill(~best.unsqueeze(-1), -math.inf).flatten(-2)


class ExpertChoice(Router):
    """Each expert chooses its C best tokens of a sequence (Zhou et al. 2022), so the load is always balanced.

    The choice depends on later tokens of the sequence. So a causal model trained this way uses information from future
    tokens, and the same choices cannot be made during generation.
    """

    @torch.no_grad()
    def choose(self, scores_BSE: Tensor) -> Choice:
        B, S, E = scores_BSE.shape
        factor = self.knob_values.capacity_factor
        capacity = self._capacity(1.0 if factor is None else factor, self._whole(scores_BSE))
        taken_BSE = self.slices.own_slice(among_highest(self.slices.gather(in_half(scores_BSE)), capacity))
        all_experts_TE = torch.arange(E, device=scores_BSE.device).expand(B * S, E)
        no_drops = torch.zeros((), dtype=torch.int64, device=scores_BSE.device)
        most, load_E = _most_rows(scores_BSE, capacity), taken_BSE.sum((0, 1))
        return Choice(all_experts_TE, taken_BSE.flatten(0, 1), load_E, no_drops, most, None)

    def pair_weights(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        return scores_BSE.flatten(0, 1)


def _most_rows(scores_BSE: Tensor, capacity: int) -> int:
    B, S, E = scores_BSE.shape
    return B * E * min(capacity, S)


ROUTERS: dict[str, type[Router]] = {"token_choice": TokenChoice, "expert_choice": ExpertChoice}
