"""A rank's coordinates by axis, from a mapping or from a torch `DeviceMesh`. This file does not import torch."""

from collections.abc import Container, Mapping, Sequence
from typing import Protocol


class Mesh(Protocol):
    """The attributes of a torch `DeviceMesh` that `coordinates` reads."""

    @property
    def mesh_dim_names(self) -> Sequence[str] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


SAME_BATCH = ("tp", "pp", "tensor_parallel", "pipeline_parallel")
"""Axes whose ranks train on the same tokens: all ranks of a tensor-parallel group or of a pipeline have one batch."""

Axes = Mapping[str, int] | Mesh
"""Coordinates by axis, outermost axis first, e.g. ``{"dp": 3, "tp": 0}``; or a mesh over all ranks with named axes."""


def coordinates(axes: Axes | None) -> dict[str, int]:
    """This rank's coordinate on each axis. Raises ValueError if the mesh has no axis names or does not contain this
    rank."""
    if axes is None or isinstance(axes, Mapping):
        return dict(axes or {})
    names, own = axes.mesh_dim_names, axes.get_coordinate()
    if not names:
        raise ValueError("axes= is a mesh without names; pass mesh_dim_names= when you create it")
    if own is None:
        raise ValueError("axes= is a mesh that does not contain this rank; pass the mesh of all ranks")
    return {name: int(at) for name, at in zip(names, own, strict=True)}


def batch_of(coords: Mapping[str, int], same: Container[str] = SAME_BATCH) -> list[int] | None:
    """Identifies the tokens on which the rank at `coords` trains: ranks with equal values train on the same tokens,
    which count once for the job. None if no other rank trains on this rank's tokens. `same`: the axes whose ranks have
    the same tokens."""
    if not any(axis in same for axis in coords):
        return None
    return [at for axis, at in coords.items() if axis not in same]
