"""Counts the tensor storages that are alive in this process, and those that autograd saves."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from engine.parallel.local_shards import local_shard

LOOK = 4096  # the peak is checked again after operations have created this many bytes


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operations created and that are still referenced, now and at their peak.

    FSDP frees gathered weights by resizing their storages to 0, so sizes are read again each time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self.peak, self.at_peak = 0, ""

    def now(self) -> int:
        total, gone = 0, []
        for key, ref in self._alive.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)  # type: ignore[attr-defined]
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._alive[key]
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (x for x in tree_iter((args, kwargs or {})) if isinstance(x, Tensor))
        inputs = {local_shard(x).untyped_storage()._cdata for x in given}
        out, made = func(*args, **(kwargs or {})), 0
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = local_shard(tensor).untyped_storage()
                if storage._cdata not in inputs:
                    self._alive[storage._cdata] = StorageWeakRef(storage)
                    made += storage.nbytes()
        if made >= LOOK and (now := self.now()) > self.peak:
            self.peak, self.at_peak = now, str(func)
        return out


class SavedStorages:
    """The tensor storages that autograd saves inside the `with` block, except those of the modules' own parameters and
    buffers."""

    def __init__(self, *modules: nn.Module):
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        self._own = {t.untyped_storage().data_ptr() for t in tensors}
        self._kept: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedStorages":
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._own:
            self._kept[pointer] = tensor  # keeps a reference, so that no later storage gets its address
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())
