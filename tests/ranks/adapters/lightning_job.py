"""A user's training script with Lightning: a tiny Mixtral with random weights, and two added lines for the cockpit.

torchrun lightning_job.py '{"folder": ..., "accumulation": 2, ...}'. Rank 0 writes its loss for each update to
FOLDER/losses.json.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from transformers import MixtralConfig, MixtralForCausalLM

SEQUENCE, VOCABULARY, UPDATES = 16, 64, 400


class Model(pl.LightningModule):
    def __init__(self, resume: str | None, first: int, pause_s: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        config = MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
        )
        self.model = MixtralForCausalLM(config)
        self.saved: Any = torch.load(resume, weights_only=False) if resume else None
        if self.saved:
            self.load_state_dict(self.saved["state_dict"])
        self.first, self.pause_s = first, pause_s
        self.losses: list[float] = []
        self.noted: dict[int, list[float]] = {}

    def training_step(self, batch: Any, _: int) -> Any:
        time.sleep(self.pause_s)
        loss = self.model(**batch, labels=batch["input_ids"]).loss
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        update = self.first + self.trainer.global_step
        rate = optimizer.param_groups[0]["lr"]
        self.noted[update] = [sum(self.losses) / len(self.losses), rate, len(self.losses)]
        self.losses = []

    def validation_step(self, batch: Any, _: int) -> None:
        self.model(**batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = LambdaLR(optimizer, lambda step: 1 - step / UPDATES)
        if self.saved:
            optimizer.load_state_dict(self.saved["optimizer_states"][0])
            scheduler.load_state_dict(self.saved["lr_schedulers"][0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(sequences: Any) -> Any:
    """This rank's batches, in order."""
    sampler = DistributedSampler(
        sequences, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), shuffle=False
    )
    return DataLoader(sequences, batch_size=2, sampler=sampler)


def main(
    folder: str,
    accumulation: int,
    count: int = 6400,
    start: int = 0,
    pause_s: float = 0.0,
    resume: str | None = None,
    first: int = 1,
    updates: int = UPDATES,
    cockpit: bool = True,
) -> None:
    torch.set_num_threads(1)
    callbacks = []
    if cockpit:
        from agents.loop.adapters.lightning import cockpit_callback

        callbacks.append(cockpit_callback(run="tiny", run_dir=Path(folder) / "runs" / "tiny"))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=accumulation,
        max_steps=updates - first + 1,
        max_epochs=1,
        val_check_interval=10,
        default_root_dir=folder,
        callbacks=callbacks,
        use_distributed_sampler=False,  # Lightning's distributed sampler would shuffle the batches
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    tokens = torch.randint(VOCABULARY, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))
    sequences = [{"input_ids": one} for one in tokens]
    model = Model(resume, first, pause_s)
    loaders = [loader(some) for some in (sequences[start:], sequences[:4])]
    trainer.fit(model, *loaders)
    if trainer.is_global_zero:
        (Path(folder) / "losses.json").write_text(json.dumps(model.noted))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
