"""A user's training script with DeepSpeed: a small model with a MoE layer over two expert-parallel ranks, and two added
lines for the cockpit.

torchrun deepspeed_job.py '{"folder": ..., "accumulation": 2, ...}'. Rank 0 writes its loss for each update to
FOLDER/losses.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.adapters.jobs import noted_rates

SEQUENCE, VOCABULARY, WIDTH, EXPERTS, UPDATES = 16, 64, 16, 4, 400


class Model(torch.nn.Module):
    """Predicts each token from the previous token, through a MoE layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        expert = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, WIDTH))
        self.moe = MoE(
            WIDTH, expert, EXPERTS, ep_size=2, k=1, capacity_factor=1.5, min_capacity=1, use_rts=False
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Any) -> Any:
        x = self.embedding(input_ids)
        y, auxiliary, _ = self.moe(x)
        logits = self.head(x + y)[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, input_ids[:, 1:].flatten()) + 0.01 * auxiliary


def main(
    folder: str,
    accumulation: int,
    stage: int,
    count: int = 6400,
    start: int = 0,
    pause_s: float = 0.0,
    resume: str | None = None,
    first: int = 1,
    updates: int = UPDATES,
    cockpit: bool = True,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    os.chdir(folder)
    # Without this, DeepSpeed compiles its own collectives for the ranks of one machine at the start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    model = Model()
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "total_num_steps": 2 * UPDATES},
        },
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if resume:
        engine.load_checkpoint(str(Path(resume).parent), tag=Path(resume).name)
    tokens = torch.randint(VOCABULARY, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))[start:]
    sampler: Any = DistributedSampler(tokens, shuffle=False)  # type: ignore[arg-type]
    loader = DataLoader(tokens, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    if cockpit:
        from agents.loop.adapters.deepspeed import watch

        watch(engine, loader, run="tiny", run_dir=Path(folder) / "runs" / "tiny")

    update, losses, noted, rates = first, [], {}, noted_rates()
    for batch in loader:
        time.sleep(pause_s)
        loss = engine(input_ids=batch)
        engine.backward(loss)
        losses.append(loss.item())
        engine.step()
        if engine.global_steps == update:
            norm = engine.get_global_grad_norm()
            noted[update] = [
                sum(losses) / len(losses),
                rates[-1],
                len(losses),
                None if norm is None else float(norm),
            ]
            update, losses = update + 1, []
        if update > updates:
            break
    if engine.global_rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(noted))
    engine.destroy()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
