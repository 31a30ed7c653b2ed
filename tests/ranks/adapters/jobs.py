"""Starts the scripts in this folder with torchrun as two ranks, and runs cockpit commands on them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
DEADLINE_S = 300.0


class Job:
    """A training script that runs under torchrun. `folder` contains the script's losses, checkpoints and run folder."""

    def __init__(self, script: str, folder: Path, ranks: int = 2, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        words = json.dumps({"folder": str(folder), **options})
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._environ = os.environ | {"PYTHONPATH": path, "COCKPIT_RUNS": str(folder / "runs")}
        self.process = subprocess.Popen(
            [sys.executable, *TORCHRUN, str(ranks), str(Path(__file__).parent / script), words],
            env=self._environ,
            stdout=(folder / "out").open("w"),
            stderr=subprocess.STDOUT,
        )

    def cockpit(self, *words: str) -> Any:
        """Run a `cockpit` command, and return its parsed output."""
        done = subprocess.run(
            [sys.executable, "-m", "cockpit", *words, "--json"],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return json.loads(done.stdout) if done.stdout else done.stderr

    def until(self, true: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Read the run's state repeatedly until the function `true`, called with the state, returns a true value.
        Return this state."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            seen = self.cockpit("snapshot")
            if isinstance(seen, dict) and true(seen):
                return seen
            assert time.monotonic() < deadline and self.process.poll() is None, (seen, self.output)
            time.sleep(0.2)

    def losses(self) -> dict[int, Any]:
        """The loss, or the losses, that the script wrote for each step. Waits for the script to exit, and checks that
        it succeeded."""
        assert self.process.wait(DEADLINE_S) == 0, self.output
        text = (self.folder / "losses.json").read_text()
        return {int(step): noted for step, noted in json.loads(text).items()}

    @property
    def output(self) -> str:
        return (self.folder / "out").read_text()[-3000:]


@contextmanager
def job(script: str, folder: Path, **options: Any) -> Iterator[Job]:
    """Start a job, and terminate it at the end of the `with` block."""
    one = Job(script, folder, **options)
    try:
        yield one
    finally:
        one.process.terminate()  # torchrun then ends its ranks
        one.process.wait(DEADLINE_S)


def noted_rates() -> list[float]:
    """A list to which each update of an Adam optimizer in this process appends the learning rate that it uses."""
    from torch.optim import adam

    rates: list[float] = []
    update = adam.adam

    def noting(*args: Any, **kwargs: Any) -> None:
        rates.append(float(kwargs["lr"]))
        update(*args, **kwargs)

    adam.adam = noting  # type: ignore[assignment]
    return rates
