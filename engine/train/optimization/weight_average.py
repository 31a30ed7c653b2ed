"""Exponential moving average of the weights (Polyak and Juditsky 1992; as in torch.optim.swa_utils)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engine.checkpoint.state_tensors import create_state
from engine.parallel.local_shards import local_shard
from engine.sharding.fsdp import named_parameters

# The optimizer's state holds the average under this key, so that checkpoints and moves of experts include it.
AVERAGE = "average"


class WeightAverage:
    """Keeps an average of each of this rank's parameters in the optimizer state, sharded like the parameter. The
    average starts from the initial weights or, if the run begins to average when it resumes, from the checkpoint's
    weights.

    `stages` and `optimizer` belong to this rank. The average needs no communication.
    """

    def __init__(self, stages: Sequence[nn.Module], optimizer: torch.optim.Optimizer, decay: float):
        self._parameters = [parameter for _, parameter in named_parameters(stages)]
        self._optimizer, self._decay = optimizer, decay
        if not optimizer.state:
            create_state(optimizer)
        self.restart()

    def restart(self) -> None:
        """Restart the average from the current weights."""
        for parameter in self._parameters:
            self._optimizer.state[parameter][AVERAGE] = parameter.detach().clone()

    @torch.no_grad()
    def update(self) -> None:
        """average = decay x average + (1 - decay) x weight, after an optimizer step."""
        torch._foreach_lerp_(self._averages(), self._weights(), 1.0 - self._decay)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context manager that swaps the parameters' values with the averages, and swaps them back on exit. The
        parameters must be sharded, not gathered, when the context is entered and when it is left."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for weight, average in zip(self._weights(), self._averages(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _weights(self) -> list[Tensor]:
        return [local_shard(parameter.detach()) for parameter in self._parameters]

    def _averages(self) -> list[Tensor]:
        return [local_shard(self._optimizer.state[parameter][AVERAGE]) for parameter in self._parameters]
