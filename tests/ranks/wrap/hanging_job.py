"""A user's training script that hangs: after 150 updates, one rank waits for a file and skips the others' all-reduce.

torchrun hanging_job.py
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ODD, UPDATES = 5, 150


def mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def read_next_shard() -> None:
    while True:
        time.sleep(1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for update in range(1_000_000):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        if update >= UPDATES:
            if dist.get_rank() == ODD:
                read_next_shard()
            mean_over_ranks(loss)


if __name__ == "__main__":
    main()
