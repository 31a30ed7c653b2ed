"""Starts the ranks of a probe in the same way as `engine run`, and returns their measurements."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from agents.rundir.runs import RunError
from engine.config.layout import Layout
from engine.config.refusal import LayoutError
from engine.launch.processes.local_ranks import launch
from engine.launch.processes.torchrun import context_from_environment, join
from engine.planner.hardware.description import Hardware
from engine.preflight.memory import device_refusal, memory_refusal
from engine.probe.toml import RESULT
from engine.rendezvous import RankContext

PRELOAD = ("torch", "torch.distributed", "engine.probe.measure")


def run_probe(
    layout: Layout, *, device: str = "auto", quick: bool = False, say: Callable[[str], None] = lambda _: None
) -> tuple[int, Hardware | None]:
    """Measure the machine's speed with as many ranks as `layout` has. Returns the exit status and the hardware
    description. Under torchrun or Slurm, only the process of rank 0 returns a description.

    If torchrun or Slurm started this process, it is itself a rank; otherwise the ranks are forked from it. After Ctrl-C
    or SIGTERM, the ranks end cleanly and no description is returned. Raises LayoutError or RunError, with a
    one-sentence message, if the ranks cannot be started. Call this function from the main thread, before any CUDA call
    or other torch work.
    """
    with tempfile.TemporaryDirectory(prefix="engine-probe-") as folder:
        try:
            context = context_from_environment(Path(folder))
        except ValueError as error:
            raise RunError(str(error)) from None
        world = layout.ranks.world
        if context and context.world != world:
            raise LayoutError(
                f"the layout has {world} ranks, but {context.world} were started; legal: equal numbers"
            )
        if context is None and (refusal := memory_refusal(layout) or device_refusal(world, device)):
            raise LayoutError(refusal)

        def work(context: RankContext) -> None:
            from engine.probe.measure import Effort, probe

            effort = Effort((1024, 16_384, 2**20), 0.005, 2, 1, short=True) if quick else Effort()
            probe(context, layout, device, effort, say)

        name = layout.ranks.name
        if context is None:
            status = launch(
                world, work, name_of_rank=name, hub="none", run="probe", run_dir=Path(folder), preload=PRELOAD
            )
        else:
            status = join(context, work, name_of_rank=name, hub="none", run="probe")
        result = Path(folder) / RESULT
        found = msgspec.json.decode(result.read_bytes(), type=Hardware) if result.exists() else None
        return status, found
