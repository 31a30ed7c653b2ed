"""Rank <-> coordinates: pure arithmetic, no torch.

The world is pp x dp_replicate x dp_shard x cp x tp, row-major in that order (tp fastest, pp slowest). Expert
parallelism is not a factor of the world: the experts borrow ranks. So there are two views of the same ranks:

    dense   [pp, dp_replicate, fsdp = dp_shard * cp, tp]
    expert  [pp, dp_replicate, efsdp = dp_shard * cp * tp / ep, ep]
"""

from dataclasses import dataclass
from math import isqrt, prod

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Grid:
    """The sizes of the axes. Construct it, then ask `refusal` before anything else."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return prod(getattr(self, axis) for axis in ORDER)

    @property
    def dp(self) -> int:
        """How many different batches the ranks work on."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        return self.fsdp * self.tp // self.ep

    @property
    def dense(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "fsdp": self.fsdp, "tp": self.tp}

    @property
    def expert(self) -> dict[str, int]:
        """Axis -> size, outermost first: the experts' view of the same ranks."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "efsdp": self.efsdp, "ep": self.ep}

    def refusal(self) -> str | None:
        """One sentence when this is not a grid, else None."""
        for axis in (*ORDER, "ep"):
            if getattr(self, axis) < 1:
                return (
                    f"grid.{axis} = {getattr(self, axis)} is not legal; legal: a whole number of at least 1"
                )
        borrowed = self.fsdp * self.tp
        if borrowed % self.ep:
            return (
                f"grid.ep = {self.ep} does not divide dp_shard x cp x tp = {borrowed}, the ranks of a stage that "
                f"experts may borrow; legal: {listed(divisors(borrowed))}"
            )
        return None

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on every axis of both views."""
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        at: dict[str, int] = {}
        rest = rank
        for axis in reversed(ORDER):
            rest, at[axis] = divmod(rest, getattr(self, axis))
        within = (at["dp_shard"] * self.cp + at["cp"]) * self.tp + at["tp"]
        efsdp, ep = divmod(within, self.ep)
        return {axis: at[axis] for axis in ORDER} | {
            "dp": at["dp_replicate"] * self.dp_shard + at["dp_shard"],
            "fsdp": at["dp_shard"] * self.cp + at["cp"],
            "efsdp": efsdp,
            "ep": ep,
        }

    def rank(self, **at: int) -> int:
        """The rank at dense coordinates; an axis left out is at 0."""
        rank = 0
        for axis in ORDER:
            rank = rank * getattr(self, axis) + at.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """All ranks, grouped with those that differ along `axes` of the dense order alone; each group ascending."""
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coords(rank)
            together.setdefault(tuple(at[axis] for axis in ORDER if axis not in axes), []).append(rank)
        return list(together.values())

    def shown(self, rank: int) -> dict[str, int]:
        """The coordinates a person is shown, outermost first; `ep` follows from the others."""
        at = self.coords(rank)
        axes = ["pp", "dp", *(["cp"] if self.cp > 1 else []), "tp", *(["ep"] if self.ep > 1 else [])]
        return {axis: at[axis] for axis in axes}

    def name(self, rank: int) -> str:
        """``pp1 dp0 tp1``."""
        return " ".join(f"{axis}{index}" for axis, index in self.shown(rank).items() if axis != "ep")


def divisors(n: int) -> list[int]:
    """All of them, ascending; takes the square root of `n` trials."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def listed(numbers: list[int]) -> str:
    """``1, 2, 4``, as a sentence lists what is legal."""
    return ", ".join(map(str, numbers))
