"""A `Trainer` in a process group: no collective runs when a trace starts or stops, or after `close`."""

import pytest

from tests.ranks.driver import TORCH, Driver

TRAINER = """
import torch
import torch.distributed as dist
from torch.profiler import profile
from agents.rank.agent import Agent
from agents.protocol import Command
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.parallel.collectives import AsyncCollective
from engine.train.trainer import Trainer
from tests.ranks.cases.case import LAYOUT, SMALL

TINY = [*SMALL, "grid.dp_shard=2", "model.moe=none", "model.layers=1", "knobs.micro_batches=1", "train.steps=100000"]

def late(trainer):
    "Delay this rank's part in the gather of statistics, so that the leader is ahead."
    gather = trainer.reporting.summaries.gather
    def delayed(*step):
        time.sleep(0.005)
        gather(*step)
    trainer.reporting.summaries.gather = delayed
"""

PROFILED = (
    TRAINER
    + """
PROFILES = 200

class Asking(Agent):
    "Proposes a profile of one step repeatedly."
    done = 0

    @property
    def pending(self):
        return Command(self.done + 1, f"profile {self.done}", {"profile": 1})

    def settle(self, ack):
        self.done = ack.revision

def work(context):
    meet(context)
    torch.set_num_threads(1)
    meter = Meter(1, 0)
    agent = Asking(None, lambda: meter.operation)
    over = lambda: agent.done >= PROFILES
    trainer = Trainer(load(LAYOUT, TINY), meter, agent, over, traces=RUN / "traces")
    trainer.steering.profiler._write = lambda *_: None  # do not write the traces
    works, caught = [], []
    begun = AsyncCollective.__init__
    def noted(self, axis, kind, sent, given, *more, **options):
        works.extend((kind, work) for work in given)
        begun(self, axis, kind, sent, given, *more, **options)
    AsyncCollective.__init__ = noted
    def checked(turn):
        def turned(profile):
            caught.extend(kind for kind, work in works if not work.is_completed())
            works.clear()
            turn(profile)
        return turned
    profile.start, profile.stop = checked(profile.start), checked(profile.stop)
    if context.rank == 1:
        late(trainer)
    trainer.run()
    note(context, "profiles", agent.done)
    note(context, "caught", sorted(set(caught)))
    dist.destroy_process_group()
"""
)


@pytest.mark.exhaustive
@pytest.mark.timeout(120)
def test_200_profiles_beside_a_late_gather(driver: Driver) -> None:
    """If a collective ends after the trace in which it started, gloo's thread writes to memory that torch has freed."""
    status, _, errors = driver.end(driver.start(PROFILED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("caught")[0] == "[]"
    assert driver.notes("profiles") == {0: "200", 1: "200"}


CLOSED = (
    TRAINER
    + """
def work(context):
    meet(context)
    torch.set_num_threads(1)
    seen = []
    with Trainer(load(LAYOUT, TINY), on_summary=lambda summary: seen.append(summary.step)) as trainer:
        if context.rank == 1:
            late(trainer)
        for step in range(3):
            trainer.train_step(step)
    note(context, "under_way", trainer.reporting.summaries._pending)
    note(context, "seen", seen)
    dist.destroy_process_group()
"""
)


def test_a_closed_trainer_has_no_running_collective(driver: Driver) -> None:
    """gloo aborts a process that destroys a process group while a collective runs. So `close` waits for the collective
    that gathers the last summary, and returns this summary."""
    status, _, errors = driver.end(driver.start(CLOSED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("under_way") == {0: "None", 1: "None"}
    assert driver.notes("seen")[0] == "[0, 1, 2]"


SUMMED = (
    TRAINER
    + """
DENSE = [*SMALL, "grid.pp=2", "model.moe=none", "model.layers=4", "train.precision=bf16", "knobs.micro_batches=8"]

def gradients(schedule):
    "Gradients of the whole model by name, after the micro-batches of one step."
    trainer = Trainer(load(LAYOUT, [*DENSE, f"schedule.name={schedule}"]))
    trainer.meter.start_step(0)
    trainer.computation.forward_backward(0)
    mine = {name: local_shard(p.grad) for name, p in named_parameters(trainer.stages)}
    everybodys = [None, None]
    dist.all_gather_object(everybodys, mine)
    return everybodys[0] | everybodys[1]

def work(context):
    from engine.parallel.local_shards import local_shard
    from engine.sharding.fsdp import named_parameters
    globals().update(named_parameters=named_parameters, local_shard=local_shard)
    meet(context)
    torch.set_num_threads(1)
    whole = gradients("interleaved")
    for schedule in ("interleaved_zb", "zbv", "dualpipev"):
        off = {n: float((g - whole[n]).norm() / whole[n].norm()) for n, g in gradients(schedule).items()}
        assert off.keys() == whole.keys()
        note(context, schedule, max(off.values()))
    dist.destroy_process_group()
"""
)


@pytest.mark.exhaustive
def test_bf16_gradients_are_summed_in_fp32_under_every_schedule(driver: Driver) -> None:
    """Each micro-batch's gradient is bit-identical under all schedules. The schedules differ only in the order in which
    they add the 8 gradients in fp32."""
    status, _, errors = driver.end(driver.start(SUMMED, preload=TORCH))
    assert (status, errors) == (0, "")
    for schedule in ("interleaved_zb", "zbv", "dualpipev"):
        for off in driver.notes(schedule).values():
            assert float(off) < 8 * 2.0**-24, schedule


WAITED = (
    TRAINER
    + """
MOE = [*SMALL, "grid.dp_shard=2", "grid.ep=2", "knobs.capacity_factor=1.0", "model.moe.shared_experts=1",
       "model.moe.balance=bias", "train.grad_clip=0.1"]
READS = ("tolist", "item", "__float__", "__int__", "__bool__", "__index__", "cpu", "numpy", "nonzero")

def work(context):
    meet(context)
    torch.set_num_threads(1)
    trainer = Trainer(load(LAYOUT, MOE))
    trainer.train_step(0)
    seen = []
    for name in READS:
        def counted(self, *args, read=getattr(torch.Tensor, name), name=name, **options):
            seen.append(name)
            return read(self, *args, **options)
        setattr(torch.Tensor, name, counted)
    computation = trainer.computation
    trainer.meter.start_step(1)
    computation.forward_backward(1)
    note(context, "in_the_passes", " ".join(seen))
    dist.destroy_process_group()
"""
)


def test_the_host_reads_one_value_list_for_each_dispatch(driver: Driver) -> None:
    """A step dispatches tokens to experts 4 times: in 2 layers for 2 micro-batches. On a GPU each read makes the host
    wait for the device; the step reads once more, for the gradient norm. The case ep = 1 is covered by
    `tests/unit/engine/launch/test_device.py`."""
    status, _, errors = driver.end(driver.start(WAITED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert set(driver.notes("in_the_passes").values()) == {" ".join(["tolist"] * 4)}


COPIED = (
    TRAINER
    + """
def work(context):
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives
    meet(context)
    Trainer(load(LAYOUT, TINY)).close()
    note(context, "fine")
    # Simulate a torch version that copies the reduced gradients before it makes views of them.
    _fsdp_collectives._to_dtype_if_needed = lambda x, dtype: x.clone()
    try:
        Trainer(load(LAYOUT, TINY))
    except RuntimeError as error:
        note(context, "why", error)
    dist.destroy_process_group()
"""
)


def test_a_torch_that_copies_reduced_gradients_is_refused(driver: Driver) -> None:
    """With gloo, the engine writes the reduced gradients into their buffer after FSDP2 has made views of it. If a torch
    version copied the buffer instead, the copy would lack these gradients, so the engine refuses such a version."""
    status, _, errors = driver.end(driver.start(COPIED, preload=TORCH))
    assert (status, errors) == (0, "")
    assert driver.notes("fine").keys() == {0, 1}
    assert all(
        "does not reduce sharded gradients as the engine needs" in why for why in driver.notes("why").values()
    )
    assert driver.notes("why").keys() == {0, 1}
