"""Measures whether the app's memory stops growing. The app receives 36,000 steps (an hour of training at ten steps per
second), and shows all screens in turn.

    python -m tests.bench hour [--quick] [ranks=64]

The app runs headless at 200 x 60 cells. A thread feeds the app's store with the records of a scripted run as fast as it
can, and decodes each record as if it came from a socket. The benchmark prints the resident memory of the process, and
how much of it the store takes.
"""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from typing import Any

import msgspec

from agents.protocol import Update
from agents.requests import Request
from cockpit.data.sources.live import note_in_parts
from cockpit.data.store import Store
from cockpit.tui.app import CockpitApp
from tests.bench.hub.scale import memory_mib
from tests.screens.fake_run import FakeRun

STEPS, QUICK_STEPS = 36_000, 6_000
PERIOD = 40  # steps of the scripted run that are repeated
CHANGE_EVERY = 600  # steps between two changes of a knob: a change a minute at ten steps a second
LOOKS = 12
SCREENS = "12345678"
SCREEN_S = 1.0


class Fed:
    """A data source with a thread that feeds the steps of a scripted run to the store."""

    operator, owns_run, target = True, False, "demo"

    def __init__(self, run: FakeRun, steps: int) -> None:
        self._run, self._steps = run, steps
        self._store: Store | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self.step = 0

    def start(self, store: Store) -> None:
        self._store = store
        with store.lock:
            store.apply(self._run.begin())
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def sample(self, kinds: frozenset[str]) -> None: ...

    def ask(self, asked: Request) -> None: ...

    def _feed(self) -> None:
        store = self._store
        assert store is not None
        encoded = [
            [(type(update), msgspec.msgpack.encode(update)) for update in self._run.step(step)]
            for step in range(PERIOD)
        ]
        for step in range(self._steps):
            if self._ended.is_set():
                return
            updates = [
                _at(msgspec.msgpack.decode(text, type=kind), step) for kind, text in encoded[step % PERIOD]
            ]
            if step % CHANGE_EVERY == CHANGE_EVERY - 1:
                micro = (4, 8)[step // CHANGE_EVERY % 2]
                updates += self._run.change(step, f"c{step}", micro_batches=micro)
            with store.lock:
                for update in updates:
                    store.state.apply(update)
                store.set_message_age(0.0)
            note_in_parts(store, updates)
            self.step = step + 1
            time.sleep(0.0005)  # give the screen a chance to take the lock


def _at(update: Update, step: int) -> Update:
    return msgspec.structs.replace(update, step=step) if hasattr(update, "step") else update


def held_mib(item: object, seen: set[int] | None = None) -> float:
    """Size in MiB of an object and of everything that it refers to, as counted by `sys.getsizeof`."""
    seen = set() if seen is None else seen
    waiting, total = deque([item]), 0
    while waiting:
        one: Any = waiting.pop()
        if id(one) in seen or one is None or callable(one) or isinstance(one, bool | type):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            waiting.extend(one)
            waiting.extend(one.values())
        elif isinstance(one, list | tuple | set | deque):
            waiting.extend(one)
        elif isinstance(one, msgspec.Struct):
            waiting.extend(getattr(one, name) for name in one.__struct_fields__)
        elif not isinstance(one, array) and hasattr(one, "__dict__"):
            waiting.append(vars(one))
    return total / 2**20


async def measure(world: int, steps: int) -> None:
    run = FakeRun(pp=4, dp=world // 32, tp=8, ep=8, layers=8, experts=64, oversubscribed=False, steps=steps)
    source = Fed(run, steps)
    app = CockpitApp(source)
    print(f"{world} ranks\n   steps       s  app MiB  of it store", flush=True)
    began, shown = time.monotonic(), 0
    async with app.run_test(size=(200, 60)) as pilot:
        for look in range(LOOKS + 1):
            while source.step < look * steps // LOOKS:
                await pilot.press(SCREENS[shown % len(SCREENS)])
                shown += 1
                await asyncio.sleep(SCREEN_S)
            with app.store.lock:
                gc.collect()
                held = held_mib(app.store)
            spent = time.monotonic() - began
            print(f"{source.step:8}{spent:8.0f}{memory_mib(os.getpid()):9.1f}{held:13.1f}", flush=True)
        source.stop()


def main() -> None:
    """Run `measure` in a process of its own, because the other benchmarks have loaded torch into this one."""
    subprocess.run([sys.executable, "-m", "tests.bench.app.hour", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    given = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    asyncio.run(measure(int(given.get("ranks", 64)), QUICK_STEPS if "--quick" in sys.argv else STEPS))
