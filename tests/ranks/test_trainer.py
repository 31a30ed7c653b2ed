"""A Trainer in a process group: what it leaves under way, when it traces and when it ends."""

import pytest

from tests.ranks.driver import TORCH, Driver

TRAINER = """
import torch
import torch.distributed as dist
from torch.profiler import profile
from agents.rank.agent import Agent
from agents.wire import Command
from engine.layout import load
from engine.meter import Meter
from engine.parallel.comm import Started
from engine.train.trainer import Trainer
from tests.ranks.case import LAYOUT, SMALL

TINY = [*SMALL, "grid.dp_shard=2", "model.moe=none", "model.layers=1", "knobs.micro_batches=1", "train.steps=100000"]

def late(trainer):
    "This rank joins the gather of statistics so late that the leader is far ahead."
    gather = trainer._statistics.gather
    def delayed(*step):
        time.sleep(0.005)
        gather(*step)
    trainer._statistics.gather = delayed
"""

PROFILED = (
    TRAINER
    + """
PROFILES = 200

class Asking(Agent):
    "Proposes a profile of one step, again and again."
    done = 0

    @property
    def pending(self):
        return Command(self.done + 1, f"profile {self.done}", {"profile": 1})

    def settle(self, ack):
        self.done = ack.revision

def work(place):
    meet(place)
    torch.set_num_threads(1)
    meter = Meter(1, 0)
    agent = Asking(None, lambda: meter.doing)
    over = lambda: agent.done >= PROFILES
    trainer = Trainer(load(LAYOUT, TINY), meter, agent, over, traces=RUN / "traces")
    trainer.tracer._write = lambda *_: None  # what it costs is not the subject
    works, caught = [], []
    begun = Started.__init__
    def noted(self, axis, kind, sent, given, *more, **options):
        works.extend((kind, work) for work in given)
        begun(self, axis, kind, sent, given, *more, **options)
    Started.__init__ = noted
    def checked(turn):
        def turned(profile):
            caught.extend(kind for kind, work in works if not work.is_completed())
            works.clear()
            turn(profile)
        return turned
    profile.start, profile.stop = checked(profile.start), checked(profile.stop)
    if place.rank == 1:
        late(trainer)
    trainer.run()
    note(place, "profiles", agent.done)
    note(place, "caught", sorted(set(caught)))
    dist.destroy_process_group()
"""
)


@pytest.mark.timeout(120)
def test_200_profiles_beside_a_late_gather(driver: Driver) -> None:
    """Torch's profiler frees what gloo's thread writes to when a collective outlives the trace it began in."""
    status, _, errors = driver.end(driver.start(PROFILED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("caught")[0] == "[]"
    assert driver.notes("profiles") == {0: "200", 1: "200"}


CLOSED = (
    TRAINER
    + """
def work(place):
    meet(place)
    torch.set_num_threads(1)
    seen = []
    with Trainer(load(LAYOUT, TINY), on_summary=lambda summary: seen.append(summary.step)) as trainer:
        if place.rank == 1:
            late(trainer)
        for step in range(3):
            trainer.train_step(step)
    note(place, "under_way", trainer._statistics._waiting)
    note(place, "seen", seen)
    dist.destroy_process_group()
"""
)


def test_a_closed_trainer_leaves_nothing_under_way(driver: Driver) -> None:
    """Gloo aborts a process that destroys a group with a collective under way; and the last summary is there."""
    status, _, errors = driver.end(driver.start(CLOSED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("under_way") == {0: "None", 1: "None"}
    assert driver.notes("seen")[0] == "[0, 1, 2]"
