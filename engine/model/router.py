"""The router: which experts take which tokens, and with what weight.

Everything about a sequence is counted over the whole sequence, also when its slices lie on several ranks, so choices,
drops, losses and gradients are the same in every layout. Of equal scores the lower number wins, expert or position.

Shapes: B sequences, S tokens of this rank's slice, T = B S, W tokens of a whole sequence, D model, E experts, K top-k,
G groups of experts, C capacity.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config.knob_values import KnobValues
from engine.config.layout import Moe
from engine.kernels.precision import at_least_fp32
from engine.model.balancing_losses import attach_loss, sequence_balance, updated_bias, z_loss
from engine.model.token_dropping import WITHIN, among_highest, highest, in_half
from engine.parallel.parameters import ParameterFactory


@dataclass(frozen=True)
class Choice:
    """What became of one micro-batch's tokens. Made once; a recomputed forward uses it again."""

    experts_TK: Tensor  # the experts a token has a say on: its top-k, or all of them where experts choose
    keep_TK: Tensor | None  # of those the pairs that run; None = all
    load_E: Tensor  # pairs routed from this rank's tokens, dropped ones too
    dropped: Tensor  # how many of them are over capacity
    share_BE: Tensor | None  # of a whole sequence's pairs those on each expert, for the balancing loss


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits_BSE: logits_BSE.softmax(-1),
    "sigmoid": torch.sigmoid,
}


class Router(nn.Module, ABC):
    """Scores tokens against experts. `choose` decides without a gradient, `weigh` and `balanced` carry it."""

    bias: Tensor | None

    def __init__(self, weights: ParameterFactory, name: str, moe: Moe, d_model: int, knob_values: KnobValues):
        super().__init__()
        self.moe, self.knob_values, self.slices = moe, knob_values, weights.slices
        self.weight = weights.replicated(name, (moe.experts, d_model), 0.02)
        bias = (
            at_least_fp32(torch.zeros(moe.experts, device=weights.device)) if "bias" in moe.balances else None
        )
        self.register_buffer("bias", bias)  # state: it is saved with the weights
        self._score = weights.compiled(SCORES[moe.score])
        self._balance, self._z_loss = weights.compiled(sequence_balance), weights.compiled(z_loss)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's logits and scores, both [B, S, E], in fp32 at least."""
        logits_BSE = F.linear(at_least_fp32(x_BSD), at_least_fp32(self.weight))
        return logits_BSE, self._score(logits_BSE)

    @abstractmethod
    def choose(self, scores_BSE: Tensor) -> Choice:
        """Decide, for the whole of each sequence."""

    @abstractmethod
    def weigh(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        """What each pair's output counts in its token's, [T, K]."""

    def balanced(self, out_TD: Tensor, logits_BSE: Tensor, scores_BSE: Tensor, choice: Choice) -> Tensor:
        """`out_TD` itself, with the router's own losses joined to what is minimised."""
        whole, knob_values = self._whole(scores_BSE), self.knob_values
        if choice.share_BE is not None:
            aux = self._balance(scores_BSE, choice.share_BE, whole)
            out_TD = attach_loss(out_TD, aux, knob_values.aux_loss_coef * knob_values.aux_scale)
        if knob_values.z_loss_coef:
            out_TD = attach_loss(
                out_TD, self._z_loss(logits_BSE, whole), knob_values.z_loss_coef * knob_values.aux_scale
            )
        return out_TD

    @torch.no_grad()
    def update_bias(self, load_E: Tensor) -> None:
        """Move the bias against a step's load, that of the whole job."""
        if self.bias is not None:
            self.bias.copy_(updated_bias(self.bias, load_E, self.knob_values.bias_rate))

    def _whole(self, x_BSE: Tensor) -> int:
        return x_BSE.shape[1] * self.slices.count

    def _capacity(self, factor: float, whole: int) -> int:
        """The pairs of one sequence that an expert takes: `factor` times an even share, and never a token twice."""
        return min(whole, math.ceil(factor * whole * self.moe.top_k / self.moe.experts))


class TokenChoice(Router):
    """Each token takes its K best experts (Shazeer et al. 2017), from its best groups where those are limited.

    The bias counts in the choice alone, not in the weight (Wang et al. 2024).
    """

    @torch.no_grad()
    def choose(self, scores_BSE: Tensor) -> Choice:
        wanted_BSE = scores_BSE if self.bias is None else scores_BSE + self.bias
        top_BSK = highest(self._in_best_groups(wanted_BSE), self.moe.top_k)
        chosen_BSE = torch.zeros_like(scores_BSE, dtype=torch.int32).scatter_(-1, top_BSK, 1)
        whole, keep_TK, total_BE = self._whole(scores_BSE), None, None
        dropped = torch.zeros((), dtype=torch.int64, device=scores_BSE.device)
        if self.knob_values.capacity_factor is not None:
            capacity = self._capacity(self.knob_values.capacity_factor, whole)
            within_BSE, total_BE = WITHIN[self.moe.drop](self.slices, chosen_BSE, scores_BSE, capacity)
            keep_TK = within_BSE.gather(-1, top_BSK).flatten(0, 1)
            dropped = (~keep_TK).sum()
        share_BE = None
        if "aux" in self.moe.balances:
            share_BE = self._share(scores_BSE, chosen_BSE, total_BE) / (whole * self.moe.top_k)
        return Choice(top_BSK.flatten(0, 1), keep_TK, chosen_BSE.sum((0, 1)), dropped, share_BE)

    def weigh(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        top_TK = scores_BSE.flatten(0, 1).gather(1, choice.experts_TK)
        if self.moe.top_k == 1:  # p / p would be 1, and a top-1 router would learn nothing from the loss
            return top_TK
        return top_TK / top_TK.sum(-1, keepdim=True)

    def _share(self, scores_BSE: Tensor, chosen_BSE: Tensor, total_BE: Tensor | None) -> Tensor:
        """How often a sequence's tokens chose each expert, [B, E]; where a bias decides with the scores, how often they
        would by their highest scores alone, in all groups (DeepSeek-V3 2024, eq. 18)."""
        if self.bias is not None:
            top_BSK = highest(scores_BSE, self.moe.top_k)
            chosen_BSE, total_BE = torch.zeros_like(chosen_BSE).scatter_(-1, top_BSK, 1), None
        return self.slices.earlier_choices(chosen_BSE)[1] if total_BE is None else total_BE

    def _in_best_groups(self, wanted_BSE: Tensor) -> Tensor:
        """Minus infinity outside a token's best groups. A group is as good as its best K / top_groups experts together
        (DeepSeek-V3 2024, section 2.1.2); with one of each group that is its best expert (DeepSeek-V2 2024)."""
        moe = self.moe
        if moe.top_groups is None or moe.top_groups == moe.groups:
            return wanted_BSE
        B, S, _ = wanted_BSE.shape
        groups_BSGe = wanted_BSE.view(B, S, moe.groups, -1)
        good_BSG = groups_BSGe.topk(math.ceil(moe.top_k / moe.top_groups)).values.sum(-1)
        best = torch.zeros_like(good_BSG, dtype=torch.bool).scatter_(
            -1, highest(good_BSG, moe.top_groups), True
        )
        return groups_BSGe.masked_fill(~best.unsqueeze(-1), -math.inf).flatten(-2)


class ExpertChoice(Router):
    """Each expert takes its C best tokens of a sequence (Zhou et al. 2022), so the load is even by itself.

    It looks at the whole sequence: whether a token is taken depends on later ones. Fine for studying balance, but a
    causal model trained so has seen a little of its future, and cannot choose in the same way when it generates.
    """

    @torch.no_grad()
    def choose(self, scores_BSE: Tensor) -> Choice:
        B, S, E = scores_BSE.shape
        factor = self.knob_values.capacity_factor
        capacity = self._capacity(1.0 if factor is None else factor, self._whole(scores_BSE))
        taken_BSE = self.slices.own_slice(among_highest(self.slices.gather(in_half(scores_BSE)), capacity))
        everyone_TE = torch.arange(E, device=scores_BSE.device).expand(B * S, E)
        nothing = torch.zeros((), dtype=torch.int64, device=scores_BSE.device)
        return Choice(everyone_TE, taken_BSE.flatten(0, 1), taken_BSE.sum((0, 1)), nothing, None)

    def weigh(self, scores_BSE: Tensor, choice: Choice) -> Tensor:
        return scores_BSE.flatten(0, 1)


ROUTERS: dict[str, type[Router]] = {"token_choice": TokenChoice, "expert_choice": ExpertChoice}
