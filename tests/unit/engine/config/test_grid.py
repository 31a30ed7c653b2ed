"""Grid arithmetic: legal and illegal sizes, and the coordinates of a rank on the dense axes and on the expert axes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.grid import Grid, divisors

SIZE = st.integers(1, 4)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    pp, dr, ds, cp, tp = (draw(SIZE) for _ in range(5))
    borrowed = ds * cp * tp
    ep = draw(st.sampled_from([d for d in range(1, borrowed + 1) if borrowed % d == 0]))
    return Grid(pp, dr, ds, cp, tp, ep)


@settings(deadline=None)  # no deadline, because the first example may take long on a busy machine
@given(grids())
def test_coordinates_are_a_bijection_in_both_views(grid: Grid) -> None:
    assert grid.refusal() is None
    dense = [tuple(grid.coords(r)[a] for a in grid.dense) for r in range(grid.world)]
    expert = [tuple(grid.coords(r)[a] for a in grid.expert) for r in range(grid.world)]
    # init_device_mesh also numbers ranks row-major, with the last axis fastest.
    assert dense == sorted(set(dense)) and len(dense) == grid.world
    assert expert == sorted(set(expert)) and len(expert) == grid.world
    for rank in range(grid.world):
        at = grid.coords(rank)
        assert (
            grid.rank(**{axis: at[axis] for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}) == rank
        )
        assert at["dp"] < grid.dp and at["fsdp"] < grid.fsdp


@pytest.mark.parametrize(
    ("sizes", "refusal"),
    [
        ({}, None),
        ({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 4}, None),
        ({"dp_shard": 4, "ep": 2}, None),
        ({"tp": 4, "ep": 4}, None),
        ({"dp_shard": 2, "cp": 2, "tp": 2, "ep": 8}, None),
        ({"dp_replicate": 2, "ep": 2}, "grid.ep = 2 does not divide dp_shard x cp x tp = 1"),
        ({"dp_shard": 2, "tp": 2, "ep": 3}, "legal: 1, 2, 4"),
        ({"dp_shard": 3, "ep": 2}, "grid.ep = 2 does not divide dp_shard x cp x tp = 3"),
        ({"pp": 0}, "grid.pp = 0 is not legal"),
        ({"ep": 0}, "grid.ep = 0 is not legal"),
    ],
)
def test_refusals_name_the_numbers(sizes: dict[str, int], refusal: str | None) -> None:
    message = Grid(**sizes).refusal()
    assert message is None if refusal is None else refusal in str(message)


def test_groups_differ_along_their_axes_alone() -> None:
    grid = Grid(pp=2, dp_shard=1, cp=2, tp=2)
    assert grid.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("cp", "tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.name(6) == "pp1 dp0 cp1 tp0"


def test_the_demo_by_hand() -> None:
    grid = Grid(pp=2, dp_shard=2, tp=2, ep=4)
    assert grid.world == 8 and grid.efsdp == 1
    assert grid.shown(5) == {"pp": 1, "dp": 0, "tp": 1, "ep": 1}
    assert grid.name(6) == "pp1 dp1 tp0"
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(16) == [1, 2, 4, 8, 16]
