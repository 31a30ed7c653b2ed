"""Effect of an expert placement, and the sentence that reports it. Torch-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figures:
    """Effect of an expert placement on one pipeline stage, as sums over the stage's layers."""

    maps_digest: float  # digest of the stage's new maps, which must be equal on all ranks of the stage
    layers: float = 0.0
    imbalance: float = 0.0
    imbalance_after: float = 0.0
    at_home: float = 0.0
    at_home_after: float = 0.0
    experts: float = 0.0  # moved
    bytes: float = 0.0  # moved


def placement_text(goal: str, total: Figures) -> str:
    """The text of the event that reports an expert placement. `goal`: `load`, `traffic` or `logical`, as the operator
    requested."""
    if not total.experts:
        return f"experts are already placed for {goal}: none was moved"
    load, after = total.imbalance / total.layers, total.imbalance_after / total.layers
    home, home_after = total.at_home / total.layers, total.at_home_after / total.layers
    return (
        f"experts placed for {goal}: the most loaded rank had {load:.2f} times the mean, {after:.2f} expected; "
        f"{100 * home:.0f} % of pairs stayed on their rank, {100 * home_after:.0f} % expected; "
        f"{total.experts:.0f} experts and {total.bytes / 2**20:.2f} MiB moved"
    )
