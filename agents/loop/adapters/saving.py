"""Saves a checkpoint when an operator requests one."""

from collections.abc import Callable

from agents.loop.adapters.torch_ranks import TorchRanks
from agents.loop.loop import CHECKPOINT, Loop
from agents.protocol import CHECKPOINT_STEP
from agents.rank.vote import LEADER

Save = Callable[[int], object]
"""Saves a checkpoint after the given number of updates; returns its path, if it is known. Collective."""


def save_requested(loop: Loop, ranks: TorchRanks, save: Save, updates: int) -> None:
    """Call `save`, and log the checkpoint or why there is none: a failed save does not end the training."""
    try:
        with loop.operation(CHECKPOINT):
            path = save(updates)
    except Exception as error:  # noqa: BLE001 - code of the program and of its library
        loop.event(f"no checkpoint of step {updates}: {error}", "error")
        return
    if ranks.rank == LEADER:
        text = f"saved a checkpoint of step {updates}" + (f" in {path}" if path else "")
        loop.event(text, facts={CHECKPOINT_STEP: updates})
