"""Runs small scripts that call `launch` or `join` as real processes, and reads the files that their ranks write for the
test."""

import os
import signal
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.ranks.program import ROOT, Program

HEAD = """
import json, os, signal, sys, time
from pathlib import Path
from engine.launch.supervision.supervisor import Timeouts
from engine.launch.processes.torchrun import join, context_from_environment
from engine.launch.processes.local_ranks import launch

HERE = Path(__file__).parent
RUN = HERE / "run"

def note(context, name, text=""):
    "Write a file for the test, atomically."
    unfinished = HERE / f".{name}.{context.rank}"
    unfinished.write_text(str(text))
    unfinished.rename(HERE / f"{name}.{context.rank}")

def meet(context):
    import torch.distributed as dist
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    return dist

def steps(context, until=lambda: False):
    "A trainer without a model: runs steps until a stop is requested."
    note(context, "pid", os.getpid())
    step = 0
    while not context.stop_requested() and not until():
        context.set_operation(step, "tp all-gather, layer 2")
        time.sleep(0.02)
        step += 1
    note(context, "finished", step)
"""

LAUNCH = """
if __name__ == "__main__":
    sys.exit(launch({world}, work, name_of_rank=lambda rank: f"dp{{rank}}", hub={hub!r}, run="a-run",
                    run_dir=RUN, preload={preload!r}, timeouts=Timeouts(**{timeouts!r})))
"""

JOIN = """
if __name__ == "__main__":
    context = context_from_environment(RUN)
    sys.exit(join(context, work, name_of_rank=lambda rank: f"dp{{rank}}", hub={hub!r}, run="a-run",
                  on_failure=lambda: print("on_failure was called")))
"""

TORCH = ("torch", "torch.distributed")


TIMEOUT_S = 120.0  # long enough even on a busy machine


def eventually(what: Callable[[], object], seconds: float = TIMEOUT_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Driver:
    """A script with its own folder, in which its ranks write small files for the test (notes)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.run_dir = folder / "run"
        self.started: list[Program] = []

    def start(
        self,
        work: str,
        world: int = 2,
        *,
        hub: str = "none",
        preload: tuple[str, ...] = (),
        timeouts: dict[str, float] | None = None,
        tail: str = LAUNCH,
        python: tuple[str, ...] = (),
        environ: dict[str, str] | None = None,
    ) -> Program:
        script = self.folder / "driver.py"
        tail = tail.format(world=world, hub=hub, preload=preload, timeouts=timeouts or {})
        # Replaced as a whole, because another rank may be reading the script at this moment.
        unfinished = script.with_suffix(".unfinished")
        unfinished.write_text(HEAD + textwrap.dedent(work) + tail)
        unfinished.replace(script)
        path = os.pathsep.join([str(ROOT), str(self.folder), os.environ.get("PYTHONPATH", "")])
        process = Program(*python, str(script), environ=os.environ | {"PYTHONPATH": path} | (environ or {}))
        self.started.append(process)
        return process

    def notes(self, name: str) -> dict[int, str]:
        return {int(file.suffix[1:]): file.read_text() for file in self.folder.glob(f"{name}.*")}

    def pids(self, world: int) -> list[int]:
        """Wait until each rank has written its process id to a file, and return these ids."""
        eventually(lambda: len(self.notes("pid")) == world)
        return [int(pid) for _, pid in sorted(self.notes("pid").items())]

    def end(self, process: Program, seconds: float = TIMEOUT_S) -> tuple[int, str, str]:
        out, err = process.communicate(timeout=seconds)
        left = [rank for rank, pid in self.notes("pid").items() if not gone(int(pid))]
        assert not left, f"ranks {left} still run after the end of their run"
        return process.returncode, out, err

    def clean(self) -> None:
        for pid in [int(pid) for pid in self.notes("pid").values()]:
            try:
                # The process of a note may have ended, and another process may have its id now.
                ours = os.getpgid(pid) in {process.pid for process in self.started}
                if ours or "driver.py" in " ".join(psutil.Process(pid).cmdline()):
                    os.kill(pid, signal.SIGKILL)
            except (psutil.NoSuchProcess, ProcessLookupError):
                pass
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()
