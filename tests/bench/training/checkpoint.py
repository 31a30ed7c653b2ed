"""Measures how long saving a checkpoint interrupts training, in a run of one rank. The rows of the printed table are:
the copy of the state into the buffers of the previous save, the copy into new memory, a whole save in the background,
and a whole save for which training waits."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext

ROUNDS = 9
LAYOUT = """
model = {layers = 4, d_model = 512, heads = 8, seq_len = 64, d_ff = 2048}
train = {steps = 1000, global_batch = 2}
checkpoint = {every = 1}
"""


def measure(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    from engine.config.toml import from_toml
    from engine.train.trainer import Trainer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(from_toml(LAYOUT), checkpoints_dir=Path(folder) / "checkpoints")
        checkpoints = trainer.saving.checkpoints
        assert checkpoints
        state = checkpoints._state
        tensors = state.tensors()
        done = 0

        def into_new_memory() -> object:
            return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}

        def into_buffers() -> None:
            checkpoints._copy(state.tensors())

        def in_the_background() -> None:
            nonlocal done
            done += 1
            checkpoints.save(done)

        def written_first() -> None:
            in_the_background()
            checkpoints.wait()

        ways: dict[str, Callable[[], object]] = {
            "a copy into buffers": into_buffers,
            "a copy into new memory": into_new_memory,
            "a save in the background": in_the_background,
            "a save before training continues": written_first,
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, way in ways.items():
                start = time.perf_counter()
                held = way()
                times[name].append(1000 * (time.perf_counter() - start))
                del held
                checkpoints.wait()
        size = sum(tensor.nbytes for tensor in tensors.values()) / 2**20
        print(f"{size:.0f} MiB of weights and optimizer state; median of {ROUNDS}")
        for name, found in times.items():
            ratio = median(a / b for a, b in zip(found, times["a copy into buffers"], strict=True))
            print(f"{name:32} {median(found):8.1f} ms   {ratio:6.2f} x", flush=True)
    dist.destroy_process_group()


def main() -> None:
    launch(1, measure, name_of_rank=str, hub="none", run="checkpoint", run_dir=Path(tempfile.mkdtemp()))
