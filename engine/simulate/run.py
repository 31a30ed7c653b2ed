"""Runs `engine simulate`: makes the run's folder, starts the hub, handles signals and writes the output."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from agents.protocol import Summary
from agents.rank.many_ranks import ManyRanks
from agents.rank.provenance import provenance
from agents.rundir.hub_supervisor import hub_of, kept, named_hub, say
from agents.rundir.run_folder import make_folder, stamped
from engine.checkpoint.folder_lock import lock_folder
from engine.config.checks.layout_checks import advice
from engine.config.layout import Layout
from engine.config.toml import write_copy, write_layout
from engine.launch.supervision.signals import Signals
from engine.planner.hardware.description import Hardware
from engine.simulate.scenario import Scenario
from engine.simulate.session import Session
from engine.simulate.simulator import Simulator

SCENARIO_FILE = "scenario.toml"  # name of the file in the run's folder


def simulate_layout(
    layout: Layout,
    hardware: Hardware,
    scenario: Scenario,
    *,
    seed: int | None = None,
    speed: float | None = 1.0,
    hub: str = "auto",
    listen: str | None = None,
    run_dir: Path | None = None,
    lost_output: Callable[[], str | None] = lambda: None,
    on_folder: Callable[[Path], None] = lambda _: None,
    on_start: Callable[[str], None] = lambda _: None,
    on_summary: Callable[[Summary], None] = lambda _: None,
    on_end: Callable[[int], None] = lambda _: None,
) -> int:
    """Simulate `layout` on `hardware` and return the exit status: 0 if the simulation completed or was stopped, 130
    after Ctrl-C.

    `speed`: simulated seconds per real second; None: as fast as possible. `seed`: seed of the simulation; None: the
    layout's seed. `hub`, `listen`, `run_dir` and `lost_output`: as in `engine.launch.run.run_layout`. Raises
    LayoutError or RunError, with a one-sentence message.
    """
    simulator = Simulator(layout, hardware, scenario, layout.run.seed if seed is None else seed)
    named = stamped(Path(layout.run.dir), layout.run.name)
    named_hub(hub, run_dir or named, listen)  # raises an error before a folder is made
    folder = make_folder(run_dir, named)
    on_folder(folder)
    say("".join(f"{line}\n" for line in (*advice(layout), *_does_not_fit(simulator))))
    with (
        Signals() as signals,
        lock_folder(folder),
        hub_of(hub, layout.run.name, folder, listen=listen) as (reached, supervisor),
    ):
        write_layout(layout, folder)
        if scenario.text:
            write_copy(folder / SCENARIO_FILE, scenario.text)
        endpoint, key, _, _ = reached or (None, None, None, None)
        on_start(folder.name)
        ranks = ManyRanks(layout.run.name, endpoint, key)
        started = provenance(folder, command=sys.argv)
        session = Session(
            layout,
            simulator,
            ranks,
            speed,
            lambda: signals.stop is not None,
            on_summary,
            lost_output,
            started,
        )
        with kept(supervisor):
            session.run()
        status = signals.exit_status
    on_end(status)
    return status


def _does_not_fit(simulator: Simulator) -> Iterator[str]:
    """A warning if the layout does not fit into the devices' memory. The simulation runs nevertheless."""
    memory, capacity = simulator.planned.memory, simulator.hardware.device.memory_bytes
    if not memory.fits(capacity):
        yield f"the layout {memory.sentence(capacity)}; it is simulated anyway"
