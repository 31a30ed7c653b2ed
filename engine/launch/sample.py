"""Generates text with a checkpoint: forks the ranks, or runs one rank under torchrun or Slurm."""

import shutil
import tempfile
from pathlib import Path

from agents.rundir.runs import RunError
from engine.config.refusal import LayoutError
from engine.launch.processes.local_ranks import launch
from engine.launch.processes.torchrun import context_from_environment, join
from engine.preflight.memory import device_refusal
from engine.rendezvous import RankContext
from engine.sampling.request import OnGenerated, OnTokens, Request

PRELOAD = ("torch", "torch.distributed", "engine.launch.sample_rank")


def run_sample(request: Request, device: str, on_tokens: OnTokens, on_generated: OnGenerated) -> int:
    """Generate text and return an exit status with the same meaning as that of `engine.launch.run.run_layout`. Rank 0
    calls `on_tokens` with each new token of each sequence. At the end, rank 0 calls `on_generated` with the generated
    tokens and the size of the attention caches, summed over all ranks: the allocated bytes, and the bytes that
    `cache_bytes` predicts. Raises LayoutError or RunError if generation cannot start."""
    grid = request.layout.ranks
    folder = Path(tempfile.mkdtemp(prefix="engine-sample-"))
    try:
        context = context_from_environment(folder)
    except ValueError as error:
        raise RunError(str(error)) from None
    if context and context.world != grid.world:
        raise LayoutError(
            f"the layout has {grid.world} ranks, but {context.world} were started; legal: equal numbers"
        )
    if context is None and (refusal := device_refusal(grid.world, device)):
        raise LayoutError(refusal)

    def work(context: RankContext) -> None:
        from engine.launch.sample_rank import sample

        sample(context, request, device, on_tokens, on_generated)

    name = request.layout.run.name
    if context is None:
        status = launch(
            grid.world, work, name_of_rank=grid.name, hub="none", run=name, run_dir=folder, preload=PRELOAD
        )
    else:
        status = join(context, work, name_of_rank=grid.name, hub="none", run=name)
    if status != 1:  # after a failure, keep the folder, because it contains failure.txt
        shutil.rmtree(folder, ignore_errors=True)
    return status
