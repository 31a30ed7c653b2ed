"""Copies of a run's tensors in host memory, made between two steps, for the thread that writes a checkpoint."""

import torch
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions


class HostCopy:
    """Buffers that all saves of a run use again. With CUDA they are pinned, and the host starts all copies before
    it waits once. The first save allocates the buffers, and they are kept until the run ends.

    The caller must not make a copy while the previous one is still read.
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
        """The copies, under the same names; they share memory as the tensors do."""
        staged = self._stager.stage(tensors)
        assert isinstance(staged, dict)
        return staged
