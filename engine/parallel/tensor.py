"""Tensor parallelism with the sequence sharded too: parameters, the embedding and the loss over a sharded vocabulary.

Between blocks a rank holds S/tp tokens of each sequence (of its cp slice, where there is cp). Attention and dense MLP
gather the sequence, multiply by a column shard, then by a row shard, and scatter the partial sums back (Korthikanti et
al. 2022).
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engine.device import CPU
from engine.kernels.compiled import Compiler
from engine.parallel.collectives import Axis
from engine.parallel.context import Context
from engine.parallel.sequence import Slices


def local(weight: Tensor) -> Tensor:
    """The shard this rank multiplies by."""
    if not isinstance(weight, DTensor):
        return weight
    part: Tensor = _Local.apply(weight)  # type: ignore[no-untyped-call]
    return part


class _Local(torch.autograd.Function):
    """`DTensor.to_local`, but a gradient is wrapped once a step and not at each micro-batch.

    Wrapping and the DTensor's own addition cost more than the gradients of a small layer. So later micro-batches are
    added to the shard of the gradient that is there, which then takes the place of the new one.
    """

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.weight = weight
        part = weight.to_local()
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        weight = ctx.weight
        if weight.grad is None:
            return DTensor.from_local(grad, weight.device_mesh, weight.placements, run_check=False)
        total = weight.grad
        total.to_local().add_(grad)
        weight.grad = None
        return total


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in the precision that softmax and sums over tokens need."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def initial(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    """Values that depend on the parameter's name and the seed, never on the layout."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.randn(shape, generator=generator, dtype=torch.float32) * std).to(torch.get_default_dtype())


class Weights:
    """Makes parameters: each rank keeps its shard of the tensor that one process would hold.

    A sharded parameter is a DTensor on its axis' mesh, so that FSDP, clipping and checkpoints know the whole; on an
    axis of size 1 it is plain.
    """

    def __init__(
        self,
        seed: int,
        tp: Axis,
        ep: Axis,
        tp_mesh: DeviceMesh | None = None,
        ep_mesh: DeviceMesh | None = None,
        ep_hops: Sequence[Axis] | None = None,  # how rows travel the ep axis; absent = directly
        context: Context | None = None,  # how a sequence is cut over cp; absent = not at all
        device: torch.device = CPU,
        compiled: Compiler | None = None,  # what is compiled of the modules these are for; absent = nothing
    ):
        self.seed, self.tp, self.ep, self.device = seed, tp, ep, device
        self.ep_hops = ([ep] if ep.size > 1 else []) if ep_hops is None else ep_hops
        self.context = context or Context.whole(tp)
        self.slices = Slices(self.context.sequence, self.context.cp.size)
        self.compiled = compiled or Compiler()
        self._tp_mesh, self._ep_mesh = tp_mesh, ep_mesh

    def replicated(self, name: str, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """The same on each tensor rank; it sees only a slice of the sequence, so its gradient is summed over tp."""
        return nn.Parameter(initial(name, shape, std, self.seed).to(self.device))

    def ones(self, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.ones(shape, device=self.device))

    def sharded(self, name: str, shape: tuple[int, ...], std: float, dim: int) -> nn.Parameter:
        """Split over tp along `dim`: 0 for column-parallel [out, in] weights, 1 for row-parallel ones."""
        part = initial(name, shape, std, self.seed).chunk(self.tp.size, dim)[self.tp.rank].contiguous()
        return nn.Parameter(_on_mesh(part.to(self.device), self._tp_mesh, dim))

    def experts(self, name: str, count: int, shape: tuple[int, ...], std: float) -> nn.Parameter:
        """[count / ep, *shape]: this rank's experts, whole."""
        mine = count // self.ep.size
        first = self.ep.rank * mine
        stack = [initial(f"{name}.{e}", shape, std, self.seed) for e in range(first, first + mine)]
        return nn.Parameter(_on_mesh(torch.stack(stack).to(self.device), self._ep_mesh, 0))


def _on_mesh(part: Tensor, mesh: DeviceMesh | None, dim: int) -> Tensor:
    if mesh is None or mesh.size() == 1:
        return part
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)


class Embedding(nn.Module):
    """Token ids of the whole sequence [B, S] to this rank's slice [B, S/tp, D]; each rank holds V/tp rows."""

    def __init__(self, weights: Weights, vocab: int, d_model: int):
        super().__init__()
        self.tp = weights.tp
        self.rows = vocab // self.tp.size
        self.weight = weights.sharded("embedding", (vocab, d_model), 0.02, 0)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        here = tokens_BS - self.tp.rank * self.rows
        elsewhere = (here < 0) | (here >= self.rows)
        rows = nn.functional.embedding(here.masked_fill(elsewhere, 0), local(self.weight))
        return self.tp.scatter_sequence(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class Head(nn.Module):
    """This rank's slice [B, S/tp, D] to logits of the whole sequence over its share of the vocabulary [B, S, V/tp].

    Its weight may be the embedding's, `tied` (Press and Wolf 2017): both lie over tp in the same way. Where the
    embedding is on another stage, the head is `copied`: its weight begins as the same and is kept so.
    """

    def __init__(
        self,
        weights: Weights,
        vocab: int,
        d_model: int,
        tied: nn.Parameter | None = None,
        copied: bool = False,
    ):
        super().__init__()
        self.tp, self.copied = weights.tp, copied
        name = "embedding" if copied else "head"
        self.weight = weights.sharded(name, (vocab, d_model), 0.02, 0) if tied is None else tied

    def forward(self, x_BSD: Tensor) -> Tensor:
        return nn.functional.linear(self.tp.gather_sequence(x_BSD), local(self.weight))


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor, tp: Axis) -> Tensor:
    """Sum over tokens of -log p(target), with the vocabulary sharded over tp; the same on every tensor rank.

    Full logits are never gathered: three numbers a token are. Targets below 0 do not count.
    """
    loss: Tensor = _CrossEntropy.apply(logits_BSV, targets_BS, tp)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BSV: Tensor, targets_BS: Tensor, tp: Axis) -> Tensor:
        logits = at_least_fp32(logits_BSV)
        rows = logits.shape[-1]
        here = targets_BS - tp.rank * rows
        mine = (here >= 0) & (here < rows)
        index = here.masked_fill(~mine, 0).unsqueeze(-1)
        top = logits.amax(-1)
        scaled = (logits - top.unsqueeze(-1)).exp_()
        total = scaled.sum(-1)
        target = logits.gather(-1, index).squeeze(-1).masked_fill(~mine, 0.0)
        tops, totals, hits = tp.all_gather(torch.stack((top, total, target))).unbind(1)
        highest = tops.amax(0)
        sum_exp = (totals * (tops - highest).exp()).sum(0)
        valid = targets_BS >= 0
        losses = (sum_exp.log() + highest - hits.sum(0)).masked_fill(~valid, 0.0)
        ctx.save_for_backward(scaled, (top - highest).exp() / sum_exp, index, mine, valid)
        ctx.dtype = logits_BSV.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        scaled, to_probs, index, mine, valid = ctx.saved_tensors
        grads_BS = grad * valid
        d_logits = scaled * (to_probs * grads_BS).unsqueeze(-1)
        d_logits.scatter_add_(-1, index, -(grads_BS * mine).unsqueeze(-1))
        return d_logits.to(ctx.dtype), None, None
