"""Decides what happens after all ranks have ended. Either the run ends, or its ranks start again from the newest
complete checkpoint, with the same layout or with another."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from agents.rundir.hub_supervisor import say
from agents.rundir.runs import RunError
from engine.checkpoint.resume_point import Start as Resumed
from engine.config.layout import Layout
from engine.config.refusal import RefusedError
from engine.config.relayout import KEYS, changed_text, relaid, smaller
from engine.launch.processes.local_ranks import Ended, Start
from engine.launch.restarts.restart import Cause, Handover, Restart
from engine.launch.supervision.failure import Outcome, sentence
from engine.preflight.memory import memory_refusal
from engine.rendezvous import Work

MOST_WITHOUT_A_STEP = 3  # maximum number of consecutive starts that train no step beyond the checkpoint
MOVED = [f"{section}.{key}" for section, keys in KEYS.items() for key in keys]


@dataclass(frozen=True)
class Attempt:
    """One start of the ranks: the layout as the user or an operator wrote it, the checkpoint from which they start, and
    the reason for the start."""

    layout: Layout
    resumed: Resumed
    restart: Restart

    @property
    def first_step(self) -> int:
        return self.resumed.checkpoint.manifest.step if self.resumed.checkpoint else 0


class Restarts:
    """Decides whether the ranks of a run are started again after they have ended, and from which checkpoint.
    `find(layout, fixed)` finds the checkpoint from which the ranks of a layout continue this run. `work_of(attempt)`
    returns the function that each rank runs."""

    def __init__(
        self,
        first: Layout,
        resumed: Resumed,
        find: Callable[[Layout, list[str]], Resumed],
        work_of: Callable[[Attempt], Work],
        on_restart: Callable[[Attempt], None],
    ):
        self._handover = Handover()
        self._find, self._work_of, self._on_restart = find, work_of, on_restart
        self.attempt = Attempt(first, resumed, Restart(self._handover))
        self._failures = self._in_vain = 0

    def _start(self) -> Start:
        grid = self.attempt.layout.ranks
        return Start(grid.world, self._work_of(self.attempt), grid.name)

    def after(self, ended: Ended) -> Start | int | None:
        """Decide what happens after the ranks have ended: a `Start` to start ranks again, exit status 1 if they cannot
        start again, or None to end the run."""
        try:
            if ended.root is None:
                text = self._handover.text
                return None if text is None else self._relay(text)
            return self._recover(ended, ended.root)
        except (RefusedError, RunError) as error:
            say(f"the ranks cannot start again: {error}\n")
            return 1

    def _relay(self, text: str) -> Start:
        new = relaid(self.attempt.layout, text)
        return self._again(new, "relayout", changed_text(self.attempt.layout, new), 0)

    def _recover(self, ended: Ended, root: Outcome) -> Start | int | None:
        elastic, layout = self.attempt.layout.elastic, self.attempt.layout
        if not elastic.restarts or (root.report and root.report.refused):
            return None
        died = sentence(root, layout.ranks.name(root.rank))
        self._failures += 1
        if self._failures > elastic.restarts:
            say(f"the run ends: elastic.restarts = {elastic.restarts} restarts have been used\n")
            return None
        done = max((outcome.where.step for outcome in ended.outcomes if outcome.where), default=0)
        self._in_vain = 0 if done > self.attempt.first_step else self._in_vain + 1
        if self._in_vain >= MOST_WITHOUT_A_STEP:
            say(f"the run ends: {self._in_vain} consecutive starts failed before they had trained a step\n")
            return None
        why = died
        if elastic.on_loss == "shrink":
            world = layout.ranks.world
            fits = (one for one in smaller(layout, world - 1, elastic.min_ranks) if not memory_refusal(one))
            found = next(fits, None)
            if found is None:
                say(
                    f"the run ends: no legal layout has {elastic.min_ranks} (elastic.min_ranks) to {world - 1} ranks\n"
                )
                return None
            why = f"{died}; {changed_text(layout, found)}"
            layout = found
        return self._again(layout, "failure", why, done)

    def _again(self, layout: Layout, cause: Cause, why: str, done: int) -> Start:
        resumed = self._find(layout, MOVED)
        former = self.attempt.restart
        attempt = Attempt(layout, resumed, replace(former, number=former.number + 1, cause=cause, why=why))
        lost = max(0, done - attempt.first_step)
        self.attempt = replace(attempt, restart=replace(attempt.restart, lost_steps=lost))
        self._on_restart(self.attempt)
        return self._start()
