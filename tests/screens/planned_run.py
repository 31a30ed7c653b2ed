"""A scripted run with a layout in its folder, so that the planner can plan it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from agents.protocol import Hello, Update, Vitals
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


def large_layout() -> Layout:
    return load("layouts/demo.toml", [f"{key}={value}" for key, value in LARGE.items()])


@dataclass
class PlannedRun(FakeRun):
    """Eight ranks on GPUs, or on CPUs if `gpu` is false. `folder`: where the layout is written."""

    folder: Path = field(default_factory=Path)
    layout: Layout = field(default_factory=large_layout)
    oversubscribed: bool = False
    gpu: bool = True
    gib: int = 80  # memory of a device

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
