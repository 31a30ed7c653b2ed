"""A rank's coordinates by axis, from a mapping or from a torch `DeviceMesh`. This file does not import torch."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Mesh(Protocol):
    """The attributes of a torch `DeviceMesh` that `coordinates` reads."""

    @property
    def mesh_dim_names(self) -> Sequence[str] | None: ...

    def get_coordinate(self) -> Sequence[int] | None: ...


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
