"""A scripted run whose folder contains a layout, so that the planner can predict its memory and step time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from agents.protocol import Hello, Step, Summary, Timeline, Traffic, Update, Vitals
from engine.config.layout import Layout
from engine.config.toml import load, write_layout
from tests.screens.fake_run import FakeRun

LARGE = {
    "model.seq_len": 4096,
    "train.precision": "bf16",
    "model.d_model": 2048,
    "model.heads": 16,
    "model.kv_heads": 8,
    "model.layers": 32,
    "model.vocab": 32000,
    "model.moe.d_expert": 1024,
    "model.moe.experts": 64,
    "train.global_batch": 64,
}
"""A model whose plan fills most of an A100."""
PEAK = (48 << 30, 36 << 30)  # peak memory of the ranks of each stage


def large_layout() -> Layout:
    return load("layouts/demo.toml", [f"{key}={value}" for key, value in LARGE.items()])


@dataclass
class PlannedRun(FakeRun):
    """A scripted run of eight ranks on GPUs, or on CPUs if `gpu` is false. `folder`: the run's folder, where its layout
    file is written."""

    folder: Path = field(default_factory=Path)
    layout: Layout = field(default_factory=large_layout)
    oversubscribed: bool = False
    gpu: bool = True
    gib: int = 80  # memory of a device
    slower: float = 3.0  # eight A100 need about two seconds for a step of the large model

    def step(self, step: int) -> Iterator[Update]:
        for update in super().step(step):
            yield _slower(update, self.slower, self.coords) if self.gpu else update

    def begin(self) -> Iterator[Update]:
        write_layout(self.layout, self.folder)
        for update in super().begin():
            if isinstance(update, Hello):
                facts = update.facts | {"folder": str(self.folder)}
                device = f"NVIDIA A100-SXM4-{self.gib}GB" if self.gpu else "cpu"
                update = structs.replace(update, layout=self.layout.digest(), device=device, facts=facts)
            yield update
        if self.gpu:
            for rank in range(self.world):
                yield Vitals(
                    rank, 0, device_memory_bytes=(30 + rank) << 30, device_memory_total=self.gib << 30
                )


def _slower(update: Update, times: float, coords: Callable[[int], Mapping[str, int]]) -> Update:
    """A copy of the update as a slower run of a large model would send it: all durations are multiplied by `times`, the
    tokens per second are divided by `times`, and a rank's memory use is about the `PEAK` of its stage."""
    match update:
        case Step():
            phases = {name: times * ms for name, ms in update.phases.items()}
            memory = PEAK[coords(update.rank)["pp"]] + (update.rank << 20)
            step_ms = times * update.step_ms
            return structs.replace(
                update, step_ms=step_ms, phases=phases, comm=_longer(update.comm, times), memory_bytes=memory
            )
        case Summary():
            step_ms, rate = times * update.step_ms, update.tokens_per_s / times
            return structs.replace(
                update, step_ms=step_ms, tokens_per_s=rate, comm=_longer(update.comm, times)
            )
        case Timeline():
            actions = [
                structs.replace(one, start_ms=times * one.start_ms, end_ms=times * one.end_ms)
                for one in update.actions
            ]
            return structs.replace(update, window_ms=times * update.window_ms, actions=actions)
    return update


def _longer(comm: Mapping[str, Traffic], times: float) -> dict[str, Traffic]:
    return {
        axis: structs.replace(one, ms=times * one.ms, exposed_ms=times * one.exposed_ms)
        for axis, one in comm.items()
    }
