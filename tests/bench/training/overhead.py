"""Measures the overhead of telemetry and control: each is turned on and off in blocks (ABBA) within one run.

There is one run for each combination of a number of ranks and a size of model and batch (`SIZES`). With telemetry on,
all ranks send the same records as in a run with the default settings, to a hub on the same machine; with telemetry off,
agents send nothing and their threads sleep. With control on, the ranks vote on knob changes at each step boundary; with
control off, they do not. The ratio of mean step times is the median over ABBA groups, with a bootstrap interval. The
benchmark also measures the CPU time of agent and hub, and the CPU time that telemetry adds to the trainer's thread
(preparing and sending messages), relative to the step time.
"""

import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from agents.rundir.hub_file import read_hub_file
from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext

SIZES = {  # layers, d_model, seq_len, experts, d_expert, sequences
    "tiny": (2, 32, 32, 4, 32, 8),
    "demo": (4, 64, 64, 8, 128, 32),
}
GRIDS = {1: "ep = 1", 4: "dp_shard = 2, tp = 2, ep = 4", 8: "pp = 2, dp_shard = 2, tp = 2, ep = 4"}
LAYOUT = """
model = {{layers = {0}, d_model = {1}, heads = 4, kv_heads = 2, seq_len = {2}, moe = {{experts = {3}, top_k = 2, d_expert = {4}}}}}
train = {{steps = 1000000, global_batch = {5}, grad_clip = 1.0}}
knobs = {{micro_batches = {6}}}
grid = {{{7}}}
"""  # noqa: E501 - TOML's inline tables stand on one line
ABBA = (True, False, False, True)
BLOCK_S = 1.0  # length of a block; at least two steps
SETTLE_S = 0.25  # time ignored at the start of a block, because an agent's thread may still sleep for 0.2 s
WARM_UP = 6
SECONDS = {"telemetry": 26.0, "control": 12.0}
RESAMPLES = 10_000


def measure(context: RankContext, size: str) -> None:
    import torch
    import torch.distributed as dist

    from agents.rank.agent import Agent
    from agents.rank.sensors.vitals import Sensors
    from engine.config.toml import from_toml
    from engine.control.vote import KnobVote
    from engine.metering.meter import Meter
    from engine.train.trainer import Trainer

    class NoVote(KnobVote):
        """Replaces the vote while control is off: the ranks exchange nothing at a step boundary."""

        def __init__(self) -> None:
            self.save = False

        def begin(self, step: int, stop: bool, save: bool = False) -> None:
            self._stop = stop

        def end(self, step: int) -> bool:
            return self._stop

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store(), rank=context.rank, world_size=context.world)
    numbers = SIZES[size]
    layout = from_toml(LAYOUT.format(*numbers, 2 if context.world == 8 else 1, GRIDS[context.world]))
    meter = Meter(layout.model.layers, numbers[3])
    agent = Agent(context.hub, lambda: meter.operation, Sensors(host=context.rank == 0))
    trainer = Trainer(layout, meter, agent, local_world=context.world)
    switch = trainer.steering.vote
    step = 0

    sending_s = timed(trainer.reporting, "step", "publish")

    def run(steps: int) -> list[float]:
        nonlocal step
        took = []
        for _ in range(steps):
            began = time.perf_counter()
            trainer.train_step(step)
            took.append(time.perf_counter() - began)
            step += 1
        return took

    def agreed(value: float) -> float:
        """Broadcast rank 0's value, and return it on all ranks."""
        word = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(word, 0)
        return float(word)

    def turn_telemetry(on: bool) -> None:
        agent.mute(not on)

    def turn_control(on: bool) -> None:
        trainer.steering.vote = switch if on else NoVote()

    run(WARM_UP)
    step_s = agreed(median(run(WARM_UP)))
    block = max(2, round(BLOCK_S / step_s))
    hub = psutil.Process(read_hub_file(context.run_dir).pid) if context.rank == 0 else None
    result: dict[str, Any] = {"step_ms": step_s * 1e3}
    turns: dict[str, Callable[[bool], None]] = {"telemetry": turn_telemetry, "control": turn_control}
    for what, turn in turns.items():
        groups = max(3, round(SECONDS[what] / (4 * block * step_s)))
        cpu_s, hub_s, on_s = agent.cpu_s, cpu_of(hub), 0.0
        # CPU seconds and wall seconds, by whether `what` is on.
        cpu_and_wall = {True: [0.0, 0.0], False: [0.0, 0.0]}
        ratios, differences = [], []
        for _ in range(groups):
            took: dict[bool, list[float]] = {True: [], False: []}
            for on in ABBA:
                turn(on)
                before_s = sum(sending_s.values())
                times = run(block)
                took[on] += times[min(round(SETTLE_S / step_s), block - 2) :]
                on_s += sum(times) * on
                cpu_and_wall[on][0] += sum(sending_s.values()) - before_s
                cpu_and_wall[on][1] += sum(times)
            with_it, without = mean(took[True]), mean(took[False])
            ratios.append(with_it / without)
            differences.append(with_it - without)
        turn(True)
        result[what] = {"ratios": ratios, "us": median(differences) * 1e6}
        if what == "telemetry":
            result |= {"agent": (agent.cpu_s - cpu_s) / on_s, "hub": (cpu_of(hub) - hub_s) / on_s}
            result["sending"] = (
                cpu_and_wall[True][0] / cpu_and_wall[True][1]
                - cpu_and_wall[False][0] / cpu_and_wall[False][1]
            )
    means = torch.tensor([result["agent"], result["sending"]], dtype=torch.float64)
    dist.all_reduce(means)
    if context.rank == 0:
        result["agent"], result["sending"] = (means / context.world).tolist()
        (context.run_dir / "overhead.json").write_text(json.dumps(result))
    agent.close()
    dist.destroy_process_group()


def timed(owner: Any, *names: str) -> dict[str, float]:
    """Wrap methods of `owner` to measure their CPU time. The returned dict maps each method's name to the CPU seconds
    that its calls have taken."""
    spent = dict.fromkeys(names, 0.0)

    def wrap(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[name] += time.thread_time() - began

        return call

    for name in names:
        setattr(owner, name, wrap(name, getattr(owner, name)))
    return spent


def cpu_of(process: psutil.Process | None) -> float:
    """CPU seconds of the hub so far, on rank 0; 0 on other ranks, because only rank 0 has a handle to the hub's
    process."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def interval(ratios: list[float]) -> str:
    """The median and its 95 % bootstrap interval, as text."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    low, high = medians[RESAMPLES // 40], medians[-RESAMPLES // 40]
    return f"{median(ratios):.4f} ({low:.4f} to {high:.4f})"


def main() -> None:
    print(
        "| size | ranks | step | steps/s | telemetry on / off | groups | sending, of a step | agent, CPU | hub, CPU "
        "| control / none | |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for size in SIZES:
        for world in GRIDS:
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder)
                status = launch(
                    world, lambda context, size=size: measure(context, size), name_of_rank=str, hub="auto", run="bench",
                    run_dir=run_dir, preload=("torch", "torch.distributed", "engine.launch.rank_main"),
                )  # fmt: skip
                if status:
                    raise SystemExit(status)
                found = json.loads((run_dir / "overhead.json").read_text())
            step_ms, telemetry, control = found["step_ms"], found["telemetry"], found["control"]
            print(
                f"| {size} | {world} | {step_ms:.1f} ms | {1e3 / step_ms:.1f} | {interval(telemetry['ratios'])} "
                f"| {len(telemetry['ratios'])} | {found['sending']:.2%} | {found['agent']:.2%} | {found['hub']:.2%} "
                f"| {interval(control['ratios'])} | {control['us']:+.0f} us a step |",
                flush=True,
            )
