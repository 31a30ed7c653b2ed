"""The optimizers of a program: which one ends a step, and the factor on their learning rates."""

import weakref
from typing import Any

PATIENCE = 64  # steps of other optimizers in a row after which the main one is chosen again


class MainOptimizer:
    """Chooses the optimizer whose steps are the steps of the run: the one with the most parameters among those that
    step in turn.

    It is chosen when an optimizer steps for the second time, because the program may have several, such as those of a
    generator and a discriminator. If only others step for a while, it is chosen again, for a program that trains in
    several parts.
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
        """Count a step of an optimizer. Returns whether it ends a step of the run."""
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
    """Number of parameters that an optimizer updates; of sharded parameters, the number of the whole job."""
    return sum(one.numel() for group in optimizer.param_groups for one in group["params"])


class LearningRateScale:
    """A factor on the learning rates of all optimizers, in force only while an optimizer steps.

    Before the step the rates of its groups are multiplied, and after it the program's own values are put back. So
    schedulers, and programs that set the rates themselves, read and write their own values, and never undo the factor.
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._own: list[tuple[Any, Any, Any]] = []  # group, the program's rate, the rate in force

    def apply(self, optimizer: Any) -> None:
        """Multiply the rates of an optimizer that is about to step."""
        self.restore()  # if the last step raised an exception
        if self.scale == 1.0:
            return
        for group in optimizer.param_groups:
            own = group.get("lr")
            if own is not None:
                group["lr"] = own * self.scale
                self._own.append((group, own, group["lr"]))

    def restore(self) -> None:
        """Put back the program's own rates, where the program has not set them in the meantime."""
        for group, own, scaled in self._own:
            if group.get("lr") is scaled:
                group["lr"] = own
        self._own.clear()

    def rate(self, optimizer: Any) -> float | None:
        """The rate in force of the first group; None if it is on a device, where reading would wait for it."""
        own = optimizer.param_groups[0].get("lr")
        if own is None or getattr(getattr(own, "device", None), "type", "cpu") != "cpu":
            return None
        return float(own) * self.scale
