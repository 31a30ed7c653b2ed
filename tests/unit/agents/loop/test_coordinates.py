"""Coordinates of a rank from a torch `DeviceMesh`."""

import pytest

from agents.loop.coordinates import coordinates
from cockpit.tui.widgets.ranks.arrangement import axes_of, bands


def test_coordinates_of_a_device_mesh_arrange_the_rank_grid() -> None:
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: dict[int, dict[str, int]] = {}
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            names = ("pp", "dp_shard", "tp")
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
            found[rank] = coordinates(mesh)
            if rank == 5:
                unnamed = dist.device_mesh.init_device_mesh("cpu", (8,))
                with pytest.raises(ValueError, match="mesh_dim_names"):
                    coordinates(unnamed)
        finally:
            dist.destroy_process_group()
    assert found[6] == {"pp": 1, "dp_shard": 1, "tp": 0}
    assert axes_of(found) == ["pp", "dp_shard", "tp"]
    grid, _ = bands(found, "pp")
    assert len(grid) == 2


def test_a_mesh_without_this_rank_is_refused() -> None:
    class Elsewhere:
        mesh_dim_names = ("dp",)

        def get_coordinate(self) -> None:
            return None

    with pytest.raises(ValueError, match="does not contain this rank"):
        coordinates(Elsewhere())
