"""Simulates an hour of a run with 2 ranks in three minutes, and measures whether the memory of the hub, the app and
`cockpit watch` stops growing.

python -m tests.bench soak

An hour with 20 steps per second and about one knob change per second has 72,000 steps and 3,600 changes. The benchmark
simulates about 500 steps per second. For each step, the benchmark sends the messages that a trainer sends: a record of
each rank, a summary of the step, the expert load of each layer and, every 20 steps, the load of each expert and the
pipeline timelines.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agents import protocol
from agents.client import Client
from tests.bench.hub.scale import memory_mib
from tests.unit.agents.fleet import Fleet, HubProcess, environment

STEPS, CHANGES = 72_000, 3_600
STEPS_A_TURN, PAUSE_S = 10, 0.018
LOOKS = 12
LAYERS, EXPERTS = 4, 8

APP = """
import sys
from cockpit.tui.app import CockpitApp
from cockpit.data.sources.live import LiveSource
CockpitApp(LiveSource(sys.argv[1], operator=True)).run(headless=True, size=(200, 60))
"""


class Run(Fleet):
    """Simulated ranks that send the same messages per step as a trainer."""

    def turn(self) -> None:
        super().turn()
        step, leader = self.step, self.agents[0]
        top = [protocol.ExpertShare(expert, 0.2) for expert in range(3)]
        summaries = [protocol.LoadSummary(layer, 4096, 0, 1.3, 0.2, 0.95, 0, top) for layer in range(LAYERS)]
        leader.send(protocol.Loads(step, summaries))
        if step % 20 == 0:
            load = [protocol.LayerLoad(layer, [512] * EXPERTS, 0) for layer in range(LAYERS)]
            leader.send(protocol.Experts(step, load))
            actions = [protocol.Action("F", place, 1.0 * place, place + 0.9) for place in range(16)]
            for rank, agent in enumerate(self.agents):
                agent.send(protocol.Timeline(rank, step, 20.0, actions))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hub = HubProcess(Path(folder) / "run").start()
        stack.callback(hub.clean_up)
        client = Client(hub.endpoints.clients)
        stack.callback(client.close)
        run = Run(hub.endpoints.ranks, 2)
        stack.callback(run.close)
        while not client.state.board:
            client.poll(0.1)
        watch = [sys.executable, "-m", "cockpit", "watch", hub.endpoints.clients, "--json"]
        app = [sys.executable, "-c", APP, hub.endpoints.clients]
        started = []
        for command in (watch, app):
            started.append(
                stack.enter_context(
                    subprocess.Popen(
                        command,
                        env=environment() | {"COCKPIT_RUNS": folder},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                    )
                )
            )
            stack.callback(started[-1].kill)
        pids = [hub.process.pid, *(process.pid for process in started)]
        time.sleep(3.0)
        print("   steps  changes     hub   watch     app   MiB", flush=True)
        changes = 0
        for look in range(LOOKS + 1):
            while run.step < look * STEPS // LOOKS:
                for _ in range(STEPS_A_TURN):
                    run.turn()
                if changes < run.step * CHANGES // STEPS:
                    changes += 1
                    client.propose({"micro_batches": (8, 4)[changes % 2]}, who="soak", reason="to and fro")
                client.poll(PAUSE_S)
            columns = "".join(f"{memory_mib(pid):8.1f}" for pid in pids)
            print(f"{run.step:8}{changes:9}{columns}", flush=True)
