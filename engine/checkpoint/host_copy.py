"""Copies of a run's tensors in host memory, made between two steps, for the thread that writes a checkpoint."""

import torch
from torch import Tensor
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from engine.parallel.local_shards import local_shard, with_layout_of


class HostCopy:
    """Host buffers that all saves of a run reuse. With CUDA the buffers are pinned, and the host starts all copies and
    then waits once. The first save allocates the buffers, and they are kept until the run ends.

    The caller must not start a copy while the previous copy is still being read.
    """

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        # Torch's public `DefaultStager` wraps this class. In torch 2.11 it can be used only once.
        self._stager = StateDictStager(pin_memory=self._cuda)
        self._host_meshes: dict[DeviceMesh, DeviceMesh] = {}

    def __call__(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors; the copies have the same names, and a DTensor's copy is a DTensor on a mesh of CPUs. If two
        tensors share memory, so do their copies."""
        # Only plain tensors are staged: torch's stager fails for a DTensor whose shard is a view into a larger buffer.
        shards = {name: local_shard(tensor) for name, tensor in tensors.items()}
        staged = self._stager.stage(shards, non_blocking=self._cuda)
        if self._cuda:
            torch.cuda.synchronize()
        return {
            name: with_layout_of(tensor, staged[name], self._host_mesh(tensor))
            for name, tensor in tensors.items()
        }

    def _host_mesh(self, tensor: Tensor) -> DeviceMesh | None:
        """A mesh of CPUs with the ranks of the tensor's mesh. It has no process groups, because the copies are only
        written."""
        if not isinstance(tensor, DTensor):
            return None
        mesh = tensor.device_mesh
        if mesh not in self._host_meshes:
            names = mesh.mesh_dim_names
            self._host_meshes[mesh] = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=names, _init_backend=False)
        return self._host_meshes[mesh]
