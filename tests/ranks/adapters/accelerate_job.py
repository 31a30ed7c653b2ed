"""A user's training loop with Accelerate: a tiny Mixtral with random weights, and two added lines for the cockpit.

torchrun accelerate_job.py '{"folder": ..., "accumulation": 2, ...}'. Rank 0 writes its loss for each update to
FOLDER/losses.json.
"""

import json
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM

SEQUENCE, VOCABULARY, UPDATES = 16, 64, 400


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
    torch.manual_seed(1)
    accelerator = Accelerator(
        gradient_accumulation_steps=accumulation,
        cpu=True,
        step_scheduler_with_optimizer=True,
        project_config=ProjectConfiguration(project_dir=folder),
    )
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
    model = MixtralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / (2 * UPDATES))
    tokens = torch.randint(VOCABULARY, (count, SEQUENCE), generator=torch.Generator().manual_seed(0))
    sequences = [{"input_ids": one} for one in tokens]
    loaders = [DataLoader(some, batch_size=2) for some in (sequences[start:], sequences[:8])]
    model, optimizer, scheduler, loader, held_out = accelerator.prepare(model, optimizer, scheduler, *loaders)
    if resume:
        accelerator.load_state(resume)
    if cockpit:
        from agents.loop.adapters.accelerate import watch

        watch(accelerator, run="tiny", run_dir=Path(folder) / "runs" / "tiny")

    update, losses, noted = first, [], {}
    for batch in loader:
        time.sleep(pause_s)
        with accelerator.accumulate(model):
            loss = model(**batch, labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            losses.append(loss.item())
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                noted[update] = [sum(losses) / len(losses), norm, scheduler.get_last_lr()[0], len(losses)]
                update, losses = update + 1, []
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if update > updates:
            break
        if not losses and update % 5 == 0:
            evaluate(accelerator, model, held_out)
    evaluated = evaluate(accelerator, model, held_out)
    assert evaluated == 2, evaluated  # the batches of this rank, including those after a stop
    if accelerator.is_main_process:
        (Path(folder) / "losses.json").write_text(json.dumps(noted))
    accelerator.end_training()


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[object]) -> int:
    model.eval()
    with torch.no_grad():
        batches = sum(bool(model(**batch).logits.numel()) for batch in loader)  # type: ignore[arg-type]
    model.train()
    return batches


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
