"""A simulated run of 32 ranks with its hub, for tests of clients."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from agents.client import Client
from agents.rundir.runs import RunError, resolve
from tests.unit.agents.fleet import environment, poll_until
from tests.unit.engine.simulate.simulated import LAYOUT

NAME = "small"


@contextmanager
def simulated_run(runs: Path, speed: str = "1", *options: str) -> Iterator[Path]:
    """Start the run `small` in the folder `runs`, wait for nine steps, and yield the run's folder."""
    layout = runs / "layout.toml"
    layout.write_text(LAYOUT.replace("steps = 400", "steps = 100000"))
    words = ["simulate", str(layout), "--speed", speed, "--run-dir", str(runs / NAME), *options]
    command = [sys.executable, "-m", "engine", *words]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL) as process:
        try:
            with closing(Client(_clients(process, runs))) as client:
                poll_until(client, lambda: len(client.state.hellos) == 32 and len(client.state.summaries) > 8)
            yield runs / NAME
        finally:
            process.terminate()


def _clients(process: "subprocess.Popen[bytes]", runs: Path) -> str:
    """Wait until the run's hub has started, and return its endpoint for clients."""
    while process.poll() is None:
        try:
            return resolve(NAME, runs).clients
        except RunError:
            time.sleep(0.05)
    raise AssertionError("the simulation ended")
