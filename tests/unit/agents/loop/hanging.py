"""A training loop that hangs, with forked processes as ranks: at step 20, rank 3 skips a collective and waits in the
next one.

python hanging.py WORLD RUNS
"""

import multiprocessing
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import agents

ODD, AT = 3, 20


def all_reduce(barrier: Barrier) -> None:
    barrier.wait()


def train(rank: int, world: int, runs: Path, gradients: Barrier, metrics: Barrier) -> None:
    agent = agents.join(run="hung", rank=rank, world=world, axes={"dp": rank}, run_dir=runs / "hung")
    for number in range(1_000_000):
        with agent.step() as step:
            with step.phase("forward"):
                time.sleep(0.02)
            if (rank, number) != (ODD, AT):
                with step.phase("all-reduce of gradients"):
                    all_reduce(gradients)
            with step.phase("all-reduce of metrics"):
                all_reduce(metrics)
            step.report(loss=2.0, tokens=100)


if __name__ == "__main__":
    world, runs = int(sys.argv[1]), Path(sys.argv[2])
    processes = multiprocessing.get_context("fork")
    barriers = processes.Barrier(world), processes.Barrier(world)
    ranks = [processes.Process(target=train, args=(rank, world, runs, *barriers)) for rank in range(world)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
