"""Starts the ranks of `engine collectives` and returns their measurements."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.rundir.runs import RunError
from engine.launch.processes.local_ranks import launch
from engine.launch.processes.torchrun import context_from_environment, join
from engine.preflight.memory import device_refusal
from engine.probe.report import RESULT, Measured, Settings
from engine.rendezvous import RankContext

PRELOAD = ("torch", "torch.distributed", "engine.probe.collective_trials")


def run_collectives(
    settings: Settings, say: Callable[[str], None] = lambda _: None
) -> tuple[int, Measured | None]:
    """Time the collectives on `settings.ranks` ranks. Returns the exit status and the measured times. Under torchrun or
    Slurm, only the process of rank 0 returns times.

    If torchrun or Slurm started this process, it is itself a rank; otherwise the ranks are forked from it. After Ctrl-C
    or SIGTERM, the ranks end cleanly and no times are returned. Raises RunError, with a one-sentence message, if the
    ranks cannot be started. Call this function from the main thread, before any CUDA call or other torch work.
    """
    with tempfile.TemporaryDirectory(prefix="engine-collectives-") as folder:
        try:
            context = context_from_environment(Path(folder))
        except ValueError as error:
            raise RunError(str(error)) from None
        if context and context.world != settings.ranks:
            raise RunError(
                f"--ranks = {settings.ranks}, but {context.world} ranks were started; legal: {context.world}"
            )
        if context is None and (refusal := device_refusal(settings.ranks, settings.device)):
            raise RunError(refusal)

        def work(context: RankContext) -> None:
            from engine.probe.collective_trials import measure

            measure(context, settings, say)

        if context is None:
            status = launch(
                settings.ranks,
                work,
                name_of_rank=str,
                hub="none",
                run="collectives",
                run_dir=Path(folder),
                preload=PRELOAD,
            )
        else:
            status = join(context, work, name_of_rank=str, hub="none", run="collectives")
        result = Path(folder) / RESULT
        found = msgspec.json.decode(result.read_bytes(), type=Measured) if result.exists() else None
        return status, found
