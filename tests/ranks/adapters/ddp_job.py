"""A user's own loop with `DistributedDataParallel`. With two added lines, `join_ranks` and `agent.step()`, the job
appears in the cockpit; each knob and each action needs one more line.

torchrun ddp_job.py '{"folder": ..., "accumulation": 2, ...}'. Rank 0 writes its loss for each update to
FOLDER/losses.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from agents.loop.adapters.torch_ranks import join_ranks

FEATURES, BATCH, UPDATES = 16, 4, 2000


class State:
    """The variables that the knobs and actions change."""

    def __init__(self, accumulation: int) -> None:
        self.accumulation = accumulation
        self.saving = self.stopping = False

    def accumulate(self, value: int) -> None:
        self.accumulation = value

    def save(self) -> None:
        self.saving = True

    def stop(self) -> None:
        self.stopping = True


def batch(number: int, rank: int) -> torch.Tensor:
    """The micro-batch with this number on this rank."""
    seed = torch.Generator().manual_seed(2 * number + rank)
    return torch.randn(BATCH, FEATURES, generator=seed)


def main(
    folder: str,
    accumulation: int,
    pause_s: float = 0.0,
    resume: str | None = None,
    first: int = 1,
    updates: int = UPDATES,
    hub: str = "auto",
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank, state, number = dist.get_rank(), State(accumulation), 0
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if resume:
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        number = saved["batches"]
    agent = join_ranks("tiny", run_dir=Path(folder) / "runs" / "tiny", hub=hub)
    agent.knob(
        "accumulation", int, [1, 2, 4, 8], value=accumulation, apply=state.accumulate, loss_neutral=False
    )
    agent.action("save", state.save)
    agent.action("stop", state.stop, ends=True)
    noted: dict[int, Any] = {}
    for update in range(first, updates + 1):
        with agent.step(update) as step:
            losses = []
            for micro_batch in range(state.accumulation):
                time.sleep(pause_s)
                model.require_backward_grad_sync = micro_batch == state.accumulation - 1
                loss = model(batch(number, rank)).square().mean()
                (loss / state.accumulation).backward()
                losses.append(loss.item())
                number += 1
            optimizer.step()
            optimizer.zero_grad()
            mean = sum(losses) / len(losses)
            step.report(loss=mean, tokens=len(losses) * BATCH, lr=optimizer.param_groups[0]["lr"])
        noted[update] = [mean, len(losses)]
        if state.saving:
            state.saving = False
            if rank == 0:
                parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**parts, "batches": number}, Path(folder) / f"checkpoint-{update}.pt")
        if state.stopping:
            break
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(noted))
    agent.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
