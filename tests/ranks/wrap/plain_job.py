"""A user's training script without any code for the cockpit: DistributedDataParallel over gloo.

torchrun plain_job.py STEPS PAUSE_S. Rank 0 prints the last loss and the sum of the weights in full precision.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


def main(steps: int, pause_s: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    data: DataLoader[torch.Tensor] = DataLoader(torch.randn(8 * steps, 16), batch_size=8)  # type: ignore[arg-type]
    for batch in data:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        time.sleep(pause_s)
    if dist.get_rank() == 0:
        weights = sum(float(one.double().sum()) for one in model.parameters())
        print(f"result {loss.item()!r} {weights!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
