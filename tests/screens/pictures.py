"""Draws the pictures of docs/operate/operator.md: screens of a simulated run with a slow rank, a router collapse and a
loss spike, as SVG.

    python -m tests.screens.pictures [FOLDER]      (default docs/pictures)

The run is simulated in this process, without a hub or sockets, and is deterministic.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from msgspec import structs

from agents.alerts.detection import Detection, all_detectors
from agents.hub.recorder import Limits, Recorder
from agents.hub.telemetry.alerting import facts_of
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Event, Hello, Update
from agents.state.run_state import RunState
from cockpit.tui.screens.plan import Plan
from engine.config.toml import write_layout
from engine.simulate.telemetry.records import Operation
from tests.screens.conftest import Cockpit
from tests.screens.driver import press, settle, until
from tests.screens.fake_run import START_S, FakeRun
from tests.unit.engine.simulate.simulated import Run, codec, frames, small

SIZE = (120, 36)
STEPS, CHANGE = 220, 80
OVERRIDES = ("run.name=moe-64", "grid.dp_shard=8", "train.global_batch=256", "knobs.micro_batches=8")
SCENARIO = """
[[events]]
kind = "straggler"
step = 60
rank = 21
factor = 1.5

[[events]]
kind = "collapse"
step = 90
layer = 3
share = 0.998
ramp = 30

[[events]]
kind = "loss_spike"
step = 150
size = 0.7
half_life = 30
"""
PICTURES = {
    "healthy": (),
    "slow-rank": ("2", "w"),
    "what-if": ("7", "right"),
    "dead-expert": ("4", "w"),
    "all-to-all": ("5",),
    "marks": ("6", "e"),
    "memory": ("7", "tab"),
    "slowest-step": ("3", "w"),
    "compare": ("6", "v", "enter"),
    "info": ("i",),
}


class Simulated(FakeRun):
    """A simulated run of 64 ranks as a client receives it, with the hub's alerts."""

    def __init__(self, folder: Path, scenario: str = SCENARIO, overrides: tuple[str, ...] = ()):
        super().__init__()
        self._folder = folder
        self._run = Run(small(*OVERRIDES, *overrides), scenario, seed=3)
        self._detection = Detection(all_detectors(), cpu_s=lambda: 0.0)
        self._state = RunState()
        self._now_s = 0.0

    def story(self, steps: int, change_at: int | None = None) -> Iterator[Update]:
        for update in self._updates(steps):
            self._state.apply(update)
            yield update

    def _updates(self, steps: int) -> Iterator[Update]:
        self._folder.mkdir(exist_ok=True)
        write_layout(self._run.layout, self._folder)
        for update in self._run.introductions():
            if isinstance(update, Hello):
                update = structs.replace(update, facts=update.facts | {"folder": str(self._folder)})
            yield update  # type: ignore[misc]
        everyone = np.arange(self._run.simulator.cluster.world)
        for number in range(steps):
            if number == CHANGE:
                self._run.change(lr_scale=2.0)
                yield Event(START_S + number, "info", "hub", "revision 1 applied at step 80: lr_scale=2")
            found = self._run.step()
            self._now_s += found.times.step_s
            for rows in self._run.records.pulses(found.step, [Operation(everyone, "ep all-to-all", 1.0)]):
                for frame in frames(rows):
                    yield from codec.decode(frame)  # type: ignore[misc]
            yield from self._run.messages(found)  # type: ignore[misc]
            yield from self._run.records.timelines(found)
            if number % 20 == 19:
                yield from self._run.records.peers(found, everyone.tolist())  # type: ignore[misc]
            for alert in self._detection.check(self._state, self._now_s):
                yield Event(START_S + number, "warning", "hub", alert.text, facts_of(alert))
                yield alert


async def draw(name: str, folder: Path, out: Path) -> None:
    cockpit = Cockpit(Simulated(folder), STEPS, None, operator=True)
    async with cockpit.app.run_test(size=SIZE) as pilot:
        await press(cockpit, pilot, *PICTURES[name])
        for screen in cockpit.app.screen_stack:
            if isinstance(screen, Plan):
                model = screen.model
                await until(cockpit.app, pilot, lambda model=model: not model.worker.busy)  # type: ignore[misc]
        await settle(cockpit, pilot)
        (out / f"{name}.svg").write_text(cockpit.app.export_screenshot(title="cockpit"), encoding="utf-8")
        print(out / f"{name}.svg", flush=True)


def record_yesterday(folder: Path) -> None:
    """Record the simulated run once more in `folder`, without its faults and with another learning rate, for the
    picture that compares two runs."""
    folder.mkdir(parents=True)
    log = UpdateLog()
    recorder = Recorder(folder / "run.db", log, Limits())
    for update in Simulated(folder, "", ("train.lr=0.0002",)).story(STEPS):
        log.publish(update)
    recorder.close()


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent:
        os.environ["COCKPIT_RUNS"] = f"{parent}/runs"
        record_yesterday(Path(parent) / "runs" / "yesterday")
        for name in PICTURES:
            asyncio.run(draw(name, Path(parent) / "moe-64", out))


if __name__ == "__main__":
    main()
