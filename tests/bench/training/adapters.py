"""Measures the overhead of the adapters: jobs of two ranks train in blocks with and without one (ABBA), in the same
processes.

Each block is a separate training with its own hub; its first steps are not counted. The benchmark compares the mean
step time, and the CPU time of rank 0's process including its agent's thread.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median
from typing import Any

from tests.bench.training.overhead import ABBA, interval

ROOT = Path(__file__).parents[3]
STEPS, SKIPPED, GROUPS = 25, 5, 4
SEQUENCE, BATCH, ACCUMULATION, VOCABULARY = 64, 4, 2, 256


class Clock:
    """Wall and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def per_step(self) -> tuple[float, float]:
        """Mean wall seconds and CPU seconds of a step, without the first steps."""
        first, last = self.ends[SKIPPED], self.ends[-1]
        steps = len(self.ends) - SKIPPED - 1
        return (last[0] - first[0]) / steps, (last[1] - first[1]) / steps


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **sizes))


def sequences() -> list[dict[str, Any]]:
    import torch

    tokens = torch.randint(VOCABULARY, (STEPS * ACCUMULATION * BATCH * 2, SEQUENCE))
    return [{"input_ids": one, "labels": one} for one in tokens]


def trainer_block(folder: Path, on: bool) -> Clock:
    """One `Trainer.train()`, with or without the callback."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from agents.loop.adapters.huggingface import CockpitCallback

    clock = Clock()

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            clock.tick()

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model=mixtral(), args=arguments, train_dataset=sequences())
    if on:
        trainer.add_callback(CockpitCallback(trainer, run_dir=folder / "run"))
    trainer.add_callback(Ticks())
    trainer.train()
    return clock


def accelerate_block(folder: Path, on: bool) -> Clock:
    """One epoch of an Accelerate loop, with or without `watch`."""
    import torch
    from accelerate import Accelerator

    from agents.loop.adapters.accelerate import watch

    clock = Clock()
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION, cpu=True)
    model = mixtral()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(sequences(), batch_size=BATCH)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loop = watch(accelerator, run_dir=folder / "run") if on else None
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.tick()
    if loop:
        loop.close()  # not end_training, which would destroy the process group that later blocks need
    return clock


KINDS: dict[str, Callable[[Path, bool], Clock]] = {"Trainer": trainer_block, "Accelerate": accelerate_block}


def work(kind: str, folder: Path) -> None:
    """Run all blocks on one rank. Rank 0 writes the measurements."""
    import torch

    torch.set_num_threads(1)
    found: list[dict[str, list[float]]] = []
    for group in range(GROUPS):
        took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for number, on in enumerate(ABBA):
            took[on].append(KINDS[kind](folder / f"{group}-{number}", on).per_step())
        found.append({str(on): [mean(column) for column in zip(*took[on], strict=True)] for on in ABBA})
    if os.environ["RANK"] == "0":
        (folder / "found.json").write_text(json.dumps(found))


def main() -> None:
    if not find_spec("transformers") or not find_spec("accelerate"):
        print("skipped: pip install 'train-cockpit[adapters]'")
        return
    print("| adapter | step | with / without, wall | with / without, CPU | CPU of rank 0, a step |")
    print("|---|---|---|---|---|", flush=True)
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            done = subprocess.run(
                [sys.executable, *torchrun, "-m", __name__, kind, folder],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            groups = json.loads((Path(folder) / "found.json").read_text())
        pairs = [(group["True"], group["False"]) for group in groups]
        wall, cpu = ([on[n] / off[n] for on, off in pairs] for n in (0, 1))
        extra_ms = median(1e3 * (on[1] - off[1]) for on, off in pairs)
        step_ms = 1e3 * median(off[0] for _, off in pairs)
        print(
            f"| {kind} | {step_ms:.0f} ms | {interval(wall)} | {interval(cpu)} | {extra_ms:+.2f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    work(sys.argv[1], Path(sys.argv[2]))
