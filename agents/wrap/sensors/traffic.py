"""Traffic of a step: bytes that this rank sends in the functions of torch.distributed and in the reductions of
DistributedDataParallel, and the time that the training thread waits for them.

Bytes are counted as in docs/evidence/bytes.md. Collectives that C++ or compiled code starts without these functions are
not counted, except those of DistributedDataParallel.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agents.protocol import Traffic

ALL_RANKS = "dp"  # axis of groups of all ranks; the only axis if the program's grid is unknown
OTHER = "other"  # axis of unnamed groups of some ranks
MOST_AXES = 16
MESH = "mesh_"  # prefix of the description of a group that a DeviceMesh created


def _size(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _all_reduce(tensor: Any, ranks: int) -> int:
    return 2 * (ranks - 1) * _size(tensor) // ranks


def _part(tensor: Any, ranks: int) -> int:
    return (ranks - 1) * _size(tensor) // ranks


def _times_others(tensor: Any, ranks: int) -> int:
    return (ranks - 1) * _size(tensor)


def _whole(tensor: Any, ranks: int) -> int:
    return _size(tensor)


def _parts(tensors: Sequence[Any], ranks: int) -> int:
    return (ranks - 1) * sum(map(_size, tensors)) // ranks


def _nothing(tensor: Any, ranks: int) -> int:
    return 0


@dataclass(frozen=True)
class Collective:
    """How to compute the traffic of one torch.distributed function: the position and the name of the tensor argument
    whose size is counted, the position of the group argument, and the function that computes the bytes that a rank
    sends."""

    tensor: int
    name: str
    group: int
    sent: Callable[[Any, int], int]


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": Collective(0, "tensor", 2, _all_reduce),
    "broadcast": Collective(0, "tensor", 2, _part),
    "reduce": Collective(0, "tensor", 3, _part),
    "all_gather": Collective(1, "tensor", 2, _times_others),
    "all_gather_single": Collective(1, "input_tensor", 2, _times_others),
    "all_gather_into_tensor": Collective(1, "input_tensor", 2, _times_others),
    "reduce_scatter": Collective(0, "output", 3, _times_others),
    "reduce_scatter_single": Collective(0, "output", 3, _times_others),
    "reduce_scatter_tensor": Collective(0, "output", 3, _times_others),
    "all_to_all_single": Collective(1, "input", 4, _part),  # counted as if split evenly
    "all_to_all": Collective(1, "input_tensor_list", 2, _parts),
    "send": Collective(0, "tensor", 2, _whole),
    "isend": Collective(0, "tensor", 2, _whole),
    "recv": Collective(0, "tensor", 2, _nothing),
    "irecv": Collective(0, "tensor", 2, _nothing),
    "barrier": Collective(-1, "", 0, _nothing),
}
# Names in torch 2.13, where the functions with the old names call those with the new ones.
RENAMED = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}


class StepTraffic:
    """The traffic of the step in progress, by axis. Collectives in other threads may also add bytes."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}
        self._s: dict[str, float] = {}

    def sent(self, collective: Collective, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Count the bytes that this rank sends in a collective. Returns the axis of the call's process group."""
        group = kwargs.get("group")
        if group is None and len(args) > collective.group:
            group = args[collective.group]
        axis, ranks = axis_of(group)
        if collective.sent is not _nothing:
            tensor = args[collective.tensor] if len(args) > collective.tensor else kwargs[collective.name]
            self.add(axis, collective.sent(tensor, ranks))
        return axis

    def add(self, axis: str, sent_bytes: int) -> None:
        if axis in self._bytes or len(self._bytes) < MOST_AXES:
            self._bytes[axis] = self._bytes.get(axis, 0) + sent_bytes

    def waited(self, axis: str | None, seconds: float) -> None:
        """Add the time for which the training thread waited for a collective. `axis` is None in `Work.wait`, because an
        earlier call launched the collective. If `axis` is None and this step has traffic on exactly one axis, the time
        is added to that axis, otherwise to `OTHER`."""
        axis = axis or (next(iter(self._bytes)) if len(self._bytes) == 1 else OTHER)
        self.add(axis, 0)
        self._s[axis] = self._s.get(axis, 0.0) + seconds

    def take(self) -> dict[str, Traffic]:
        """The traffic since the last call. Only the time for which the program waits is measured, so all of this time
        counts as exposed.
        """
        sent, self._bytes = self._bytes, {}
        waited, self._s = self._s, {}
        ms = {axis: 1e3 * waited.get(axis, 0.0) for axis in sent}
        return {axis: Traffic(count, ms[axis], ms[axis]) for axis, count in sent.items()}


def axis_of(group: Any) -> tuple[str, int]:
    """The axis of a process group (the name in its DeviceMesh, if a DeviceMesh created the group), and the group's
    size."""
    import torch.distributed as dist

    world = dist.group.WORLD
    group = group if group is not None else world
    if group is None:
        return ALL_RANKS, 1
    ranks = int(group.size())
    described = str(getattr(group, "group_desc", ""))
    if described.startswith(MESH) and len(described) > len(MESH):
        return described[len(MESH) :][:64], ranks
    return (ALL_RANKS if world is not None and ranks == world.size() else OTHER), ranks


class Replicas:
    """Counts the traffic of the program's `DistributedDataParallel` modules, which start their reductions from C++.

    Bytes are computed from the sizes of the gradients and buffers. A module with a communication hook is not counted,
    because the hook may compress the gradients.
    """

    def __init__(self) -> None:
        self._gradients: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # bytes
        self._due: dict[str, int] = {}  # bytes of the reductions in the next backward pass, by axis

    def forward(self, module: Any, traffic: StepTraffic) -> None:
        """Record a forward pass of `module` in which gradients are enabled."""
        if not module.require_backward_grad_sync or getattr(module, "_comm_hooks", None):
            return
        axis, ranks = axis_of(module.process_group)
        gradients = self._gradients.get(module)
        if gradients is None:  # the parameters of a module do not change
            gradients = sum(_size(one) for one in module._module_parameters if one.requires_grad)
            self._gradients[module] = gradients
        self._due[axis] = self._due.get(axis, 0) + 2 * (ranks - 1) * gradients // ranks
        if module.will_sync_module_buffers():
            buffers = sum(map(_size, module.modules_buffers))
            traffic.add(axis, (ranks - 1) * buffers // ranks)

    def backward(self, traffic: StepTraffic) -> str | None:
        """Count the bytes of the gradient reductions in a backward pass that has ended. Returns the axis of the
        reductions; None if there were none.
        """
        due, self._due = self._due, {}
        for axis, sent in due.items():
            traffic.add(axis, sent)
        return next(iter(due), None)

    @property
    def reduces(self) -> bool:
        """Whether the next backward pass reduces gradients."""
        return bool(self._due)
