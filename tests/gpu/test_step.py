"""A training step on one GPU, in this process: the host does not wait for the GPU, and a profile shows its kernels."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from engine.config.toml import load
from engine.device import BACKENDS, set_device
from engine.metering.meter import Meter
from engine.rendezvous import single_rank_context
from engine.train.trainer import Trainer
from tests.ranks.cases.case import BF16, SMALL
from tests.unit.engine.config.test_layout import DEMO
from tests.unit.engine.launch.test_device import KINDS
from tests.unit.engine.train.test_controls import ScriptedAgent

GPU = torch.device("cuda", 0)
MORE = {
    "zero 3": ["train.zero=3"],
    "compiled": ["train.compile=true"],
    "documents": ["data.separate_documents=true", "model.head_dim=16"],
}


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank on the GPU."""
    set_device(GPU)
    store = single_rank_context(tmp_path).store()
    dist.init_process_group(BACKENDS["cuda"], store=store, rank=0, world_size=1, device_id=GPU)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS | MORE)
def test_the_host_does_not_wait_in_forward_and_backward(kind: str) -> None:
    overrides = (KINDS | MORE)[kind]
    trainer = Trainer(load(DEMO, [*SMALL, *BF16, *overrides]), Meter(2, 8, device=GPU))
    for step in range(3):  # the first steps compile kernels, and allocate memory
        trainer.train_step(step)
    trainer.meter.start_step(3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.computation.forward_backward(3)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_profile_contains_the_kernels(tmp_path: Path) -> None:
    meter = Meter(2, 8, device=GPU)
    agent = ScriptedAgent(meter)
    agent.propose({"profile": 2}, {"lr_scale": 0.9}, {"lr_scale": 0.8}, {"stop": True})
    Trainer(load(DEMO, [*SMALL, *BF16, "train.steps=30"]), meter, agent, traces=tmp_path / "profile").run()
    (path,) = (tmp_path / "profile").iterdir()
    kinds = {event.get("cat") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"kernel", "cpu_op"} <= kinds
