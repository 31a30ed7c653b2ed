"""Copies of a run's tensors in host memory, made between two steps, for the thread that writes a checkpoint."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from engine.parallel.local_shards import local_shard, with_layout_of


class HostCopy:
    """Host buffers that all saves of a run reuse. With CUDA the buffers are pinned, and the host starts all copies and
    then waits once. The first save allocates the buffers, and they are kept until the run ends.

    The caller must not start a copy while the previous copy is still being read.
    """

    def __init__(self, device: torch.device):
        cuda = device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; the copies have the same names. If two tensors share memory, so do their copies."""
        # Only plain tensors are staged: torch's stager fails for a DTensor whose shard is a view into a larger buffer.
        staged = self._stager.stage({name: local_shard(tensor) for name, tensor in tensors.items()})
        assert isinstance(staged, dict)
        return {name: with_layout_of(tensor, staged[name]) for name, tensor in tensors.items()}
