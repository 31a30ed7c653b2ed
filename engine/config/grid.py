"""Converts ranks to coordinates on the parallel axes and back. Torch-free.

The world size is pp x dp_replicate x dp_shard x cp x tp; ranks are numbered row-major in that order (tp fastest, pp
slowest). Expert parallelism reuses the ranks of other axes, so ep is not a factor. There are two views of the same
ranks:

    dense   [pp, dp_replicate, fsdp = dp_shard * cp, tp]
    expert  [pp, dp_replicate, efsdp = dp_shard * cp * tp / ep, ep]
"""

from dataclasses import dataclass
from math import isqrt, prod

ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True)
class Grid:
    """The sizes of the parallel axes. Call `refusal` after construction, because the other methods need a legal
    grid."""

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
        """The number of data-parallel ranks, each of which processes its own part of the global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        return self.fsdp * self.tp // self.ep

    @property
    def dense(self) -> dict[str, int]:
        """The size of each axis of the dense view, outermost axis first."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "fsdp": self.fsdp, "tp": self.tp}

    @property
    def expert(self) -> dict[str, int]:
        """The size of each axis of the expert view, outermost axis first."""
        return {"pp": self.pp, "dp_replicate": self.dp_replicate, "efsdp": self.efsdp, "ep": self.ep}

    def refusal(self) -> str | None:
        """One sentence that says why the sizes do not form a grid, or None if they do."""
        for axis in (*ORDER, "ep"):
            if getattr(self, axis) < 1:
                return (
                    f"grid.{axis} = {getattr(self, axis)} is not legal; legal: a whole number of at least 1"
                )
        borrowed = self.fsdp * self.tp
        if borrowed % self.ep:
            return (
                f"grid.ep = {self.ep} does not divide dp_shard x cp x tp = {borrowed}, the ranks of a "
                f"stage that ep can use; legal: {listed(divisors(borrowed))}"
            )
        return None

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on all axes of the dense and of the expert view."""
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
        """The rank with the given coordinates in the dense view; an omitted axis has coordinate 0."""
        rank = 0
        for axis in ORDER:
            rank = rank * getattr(self, axis) + at.get(axis, 0)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Groups of ranks that differ only in their coordinates on `axes` of the dense view. Each group lists its ranks
        in ascending order."""
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            at = self.coords(rank)
            together.setdefault(tuple(at[axis] for axis in ORDER if axis not in axes), []).append(rank)
        return list(together.values())

    def shown(self, rank: int) -> dict[str, int]:
        """The rank's coordinates to display, outermost axis first. The axes cp and ep are included only if their size
        is above 1."""
        at = self.coords(rank)
        axes = ["pp", "dp", *(["cp"] if self.cp > 1 else []), "tp", *(["ep"] if self.ep > 1 else [])]
        return {axis: at[axis] for axis in axes}

    def name(self, rank: int) -> str:
        """The rank's name, made of its coordinates, such as ``pp1 dp0 tp1``. `ep` is omitted, because the other
        coordinates determine it."""
        return " ".join(f"{axis}{index}" for axis, index in self.shown(rank).items() if axis != "ep")


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending; takes sqrt(n) trial divisions."""
    low = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


def listed(numbers: list[int]) -> str:
    """Format numbers for a sentence, such as ``1, 2, 4``."""
    return ", ".join(map(str, numbers))


def up_to(most: int, least: int = 1) -> str:
    """Format the range from `least` to `most` for a sentence, such as ``1 to 4``."""
    return str(least) if most == least else f"{least} to {most}"
