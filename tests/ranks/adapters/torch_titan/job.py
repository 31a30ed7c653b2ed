"""A user's training script with torchtitan's `Trainer` and its debug Llama model on CPUs, and two added lines for the
cockpit.

torchrun job.py '{"folder": ..., "accumulation": 2, ...}'. Rank 0 writes its loss for each step to
FOLDER/losses.json. torchtitan 0.3 supports only accelerators, so `use_cpu` replaces the few functions that need one.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchtitan.tools.utils as utils
from torch.distributed.fsdp import FSDPModule

STEPS, SEQUENCE, BATCH, VOCABULARY = 400, 16, 2, 2048


def use_cpu() -> None:
    """Make torchtitan train on CPUs over gloo. Call this before other modules of torchtitan are imported, because they
    read the device on import."""
    utils.device_type, utils.device_module = "cpu", torch.cpu
    utils.get_local_device = lambda: torch.device("cpu")
    import torchtitan.components.metrics as metrics
    import torchtitan.distributed.utils as distributed

    stats = metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)
    monitor = SimpleNamespace(device_name="CPU", get_peak_stats=lambda: stats, reset_peak_stats=lambda: None)
    metrics.build_device_memory_monitor = lambda: monitor
    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None


use_cpu()
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from tests.ranks.adapters.jobs import noted_rates  # noqa: E402


class Loader(BaseDataLoader):  # type: ignore[misc]
    """A data loader that returns random sequences from a fixed seed. Its state is the number of batches that it has
    returned."""

    pause_s = 0.0

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Any, *, dp_rank: int, **_: object) -> None:
        self.rank, self.returned = dp_rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            time.sleep(self.pause_s)
            seed = torch.Generator().manual_seed(2 * self.returned + self.rank)
            tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=seed)
            self.returned += 1
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"returned": self.returned}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.returned = state_dict["returned"]


def configured(folder: str, accumulation: int) -> Any:
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    HuggingFaceTokenizer.Config.build = lambda self, **_: SimpleNamespace(bos_id=0, eos_id=0)
    config.dump_folder = folder
    config.dataloader = Loader.Config()
    training = config.training
    training.local_batch_size, training.seq_len, training.steps = BATCH, SEQUENCE, STEPS
    training.global_batch_size = BATCH * 2 * accumulation
    training.mixed_precision_param, training.disable_cuda_graphs = "float32", True
    config.optimizer.implementation = "for-loop"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.activation_checkpoint = None
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    config.checkpoint.enable, config.checkpoint.interval = True, 10 * STEPS
    return config


def main(
    folder: str,
    accumulation: int,
    pause_s: float = 0.0,
    resume: str | None = None,
    steps: int = STEPS,
    tensor_parallel: int = 1,
    cockpit: bool = True,
) -> None:
    torch.set_num_threads(1)
    Loader.pause_s = pause_s
    config = configured(folder, accumulation)
    config.parallelism.tensor_parallel_degree = tensor_parallel
    if resume:
        checkpoint, step = resume.rsplit("/step-", 1)
        config.checkpoint.folder, config.checkpoint.load_step = checkpoint, int(step)
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale in a reduction
    noted: dict[int, list[float]] = {}
    rates = noted_rates()
    log = trainer.metrics_processor.log

    def note(step: int, loss: float, largest: float, norm: float, *rest: Any, **named: Any) -> None:
        metrics, dims = trainer.metrics_processor, trainer.parallel_dims
        tokens = (
            metrics.ntokens_since_last_log / dims.non_data_parallel_size
        )  # of a rank, as in torchtitan's "tps"
        noted[step] = [loss, norm, trainer.gradient_accumulation_steps, rates[-1], tokens * dims.world_size]
        log(step, loss, largest, norm, *rest, **named)

    trainer.metrics_processor.log = note
    if steps < STEPS:
        trainer.should_continue_training = lambda: trainer.step < steps
    if cockpit:
        from agents.loop.adapters.torchtitan import watch

        watch(trainer, run="tiny", run_dir=Path(folder) / "runs" / "tiny")

    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(noted))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
