"""Measures the CPU time and the disk space that recording takes, and how long a seek in a recording takes.

python -m tests.bench.hub.recording [RANKS] [STEPS]
"""

import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from agents.hub.recorder import Recorder
from agents.hub.telemetry.update_log import UpdateLog
from agents.protocol import Step, Traffic
from agents.recording.reader import Recording
from agents.recording.replay import Replay
from tests.unit.agents.fleet import make_hello, make_summary

AXES = ("tp", "ep", "pp", "dp", "control")
NOISE = random.Random(1)


def step(rank: int, number: int) -> Step:
    def ms() -> float:
        return 10 + NOISE.random()

    return Step(
        rank=rank,
        step=number,
        seq=number,
        revision=0,
        step_ms=ms(),
        phases={name: ms() for name in ("data", "forward", "backward", "optimizer", "agree")},
        tokens=4096,
        comm={axis: Traffic(1_048_576, ms(), ms()) for axis in AXES},
        a2a_bytes=1_048_576,
        bubble=NOISE.random(),
        bubble_bound=0.2,
        memory_bytes=12_345_678_901,
    )


def main(ranks: int = 1024, steps: int = 150) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.db"
        record(path, ranks, steps)
        replay = Replay(Recording(path))
        times = []
        for number in NOISE.sample(range(steps), min(20, steps)):
            began = time.perf_counter()
            replay.seek(replay.recording.at_step(number))
            times.append(1e3 * (time.perf_counter() - began))
        segments = len(replay.recording.segments())
        print(f"seeking in {segments} segments: median {median(times):.0f} ms, longest {max(times):.0f} ms")


def record(path: Path, ranks: int, steps: int) -> None:
    update_log = UpdateLog()
    recorder = Recorder(path, update_log)
    for rank in range(ranks):
        update_log.publish(make_hello(rank, ranks))
    following = 0.0
    of_all, of_this_thread = time.process_time(), time.thread_time()
    for number in range(steps):
        for rank in range(ranks):
            update_log.publish(step(rank, number))
        update_log.publish(make_summary(number))
        began = time.thread_time()
        recorder.follow()
        following += time.thread_time() - began
        while recorder._queued_bytes - recorder._written_bytes > 8 << 20:
            time.sleep(0.01)
    size = recorder._queued_bytes
    recorder.close(60)
    recording = (time.process_time() - of_all) - (time.thread_time() - of_this_thread)
    updates = update_log.seq
    print(
        f"{updates} updates of {size / updates:.0f} bytes; on disk {path.stat().st_size / size:.2f} of that"
    )
    loop, thread = 1e6 * following / updates, 1e6 * recording / updates
    print(f"the hub's loop {loop:.2f} us of CPU an update, the recorder's thread {thread:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
