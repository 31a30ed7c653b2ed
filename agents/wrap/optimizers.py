"""The optimizers of a program: chooses the one whose steps count as steps of the run."""

import weakref
from typing import Any

PATIENCE = 64  # consecutive steps of other optimizers after which the main optimizer is chosen again


class MainOptimizer:
    """Chooses the main optimizer, whose steps count as the steps of the run: the one with the most parameters.

    The choice is made when one of the optimizers takes its second step, so that the others can take their first step
    before the choice; a program may have several, such as one for a generator and one for a discriminator. If only
    other optimizers step for more than `PATIENCE` steps in a row, the choice is made again, because a program may train
    in several phases with different optimizers.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id: the optimizer, and its steps
        self._main: weakref.ref[Any] | None = None
        self._others = 0
        self.count = 0  # steps of the run so far: those of the main optimizers

    @property
    def main(self) -> Any:
        """The main optimizer; None before it is chosen."""
        return self._main() if self._main else None

    def stepped(self, optimizer: Any) -> bool:
        """Count a step of an optimizer. Returns True if this step also ends a step of the run; only steps of the main
        optimizer do."""
        known, steps = self._seen.get(id(optimizer), (None, 0))
        if known is None or known() is not optimizer:
            known, steps = weakref.ref(optimizer), 0
        self._seen[id(optimizer)] = known, steps + 1
        if self._main is None:
            if steps:
                self._choose()
                self.count = max(self.count, self._seen[id(self.main)][1])
            return False  # the time at which this step began is not known
        if self._main() is optimizer:
            self._others = 0
            self.count += 1
            return True
        self._others += 1
        if self._main() is None or self._others > PATIENCE:
            self._seen, self._main, self._others = {}, None, 0
        return False

    def _choose(self) -> None:
        alive = [one for one, _ in self._seen.values() if one() is not None]
        self._main = max(alive, key=lambda one: parameter_count(one()))


def parameter_count(optimizer: Any) -> int:
    """Number of parameters that an optimizer updates; sharded parameters (DTensor) count in full."""
    return sum(one.numel() for group in optimizer.param_groups for one in group["params"])
