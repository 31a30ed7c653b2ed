"""Measures the overhead of the adapters: in one job of two ranks, short training runs with and without an adapter
alternate in the same processes.

Each run with an adapter has its own hub; the first steps of a run are not counted. A pair is two runs, one with and one
without the adapter, in alternating order; a round is one pair for each library. Rounds are repeated until `BUDGET_S` is
spent. For the step time and for the CPU time of rank 0's process (which includes the agent's thread), the benchmark
divides the value with the adapter by the value without it, and reports the median of this ratio over the pairs, with a
bootstrap interval. Libraries that are not installed are left out.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.training.overhead import interval

ROOT = Path(__file__).parents[3]
STEPS, SKIPPED, ROUNDS = 50, 15, 2
"""Steps of a training, steps that are not counted, and the least number of rounds. The steps that are not counted take
about as long as an agent takes to connect to its hub."""

BUDGET_S = 180.0
SEQUENCE, BATCH, ACCUMULATION, VOCABULARY = 64, 4, 2, 256


MEGATRON, TORCHTITAN = "Megatron-LM", "torchtitan"
ALONE = (MEGATRON, TORCHTITAN)  # each in a job of its own, because of its substitutes for a GPU


class Clock:
    """Wall and CPU time at the end of each step."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def tick(self) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))

    def per_step(self) -> tuple[float, float]:
        """Mean wall time and mean CPU time per step in seconds; the first `SKIPPED` steps are left out."""
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
    """Call `train` of Hugging Face's `Trainer` once, with `CockpitCallback` if `on` is True; return the times of its
    steps."""
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
    """Train one epoch in a training loop that uses Accelerate, with `watch` if `on` is True; return the times of its
    steps."""
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


def lightning_block(folder: Path, on: bool) -> Clock:
    """Call `fit` of Lightning's `Trainer` once, with `cockpit_callback` if `on` is True; return the times of its
    steps."""
    import lightning.pytorch as pl
    import torch

    from agents.loop.adapters.lightning import cockpit_callback

    clock = Clock()

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = mixtral()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(**batch).loss

        def on_train_batch_end(self, outputs: Any, batch: Any, number: int) -> None:
            if (number + 1) % ACCUMULATION == 0:
                clock.tick()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        accumulate_grad_batches=ACCUMULATION,
        max_epochs=1,
        callbacks=[cockpit_callback(run_dir=folder / "run")] if on else [],
        enable_model_summary=False,
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(sequences(), batch_size=BATCH))  # type: ignore[arg-type]
    return clock


def deepspeed_block(folder: Path, on: bool) -> Clock:
    """Train in a loop with a DeepSpeed engine (ZeRO 1), with `watch` if `on` is True; return the times of the steps."""
    import deepspeed
    import torch

    from agents.loop.adapters.deepspeed import watch

    clock = Clock()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo, without compiling
    deepspeed.init_distributed("gloo")
    model = mixtral()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loader = torch.utils.data.DataLoader(sequences()[: STEPS * ACCUMULATION * BATCH], batch_size=BATCH)  # type: ignore[arg-type]
    if on:
        watch(engine, loader, run_dir=folder / "run")
    for number, batch in enumerate(loader):
        engine.backward(engine(**batch).loss)
        engine.step()
        if (number + 1) % ACCUMULATION == 0:
            clock.tick()
    engine.destroy()
    return clock


class Captured(Exception):
    """Raised instead of calling Megatron-LM's `train`; contains the arguments of the call."""


@functools.cache
def megatron(folder: Path) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Set up training with Megatron-LM's `pretrain_gpt.py`, but do not start it. Returns the arguments of `train`."""
    from tests.ranks.adapters.megatron_lm import cpu, job

    cpu.use_cpu()
    import megatron.training.training as training

    def capture(*args: Any, **kwargs: Any) -> None:
        raise Captured(args, kwargs)

    train, training.train = training.train, capture
    sizes = f"--hidden-size 64 --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE}"
    try:
        job.main(
            str(folder),
            4,
            f"{sizes} --micro-batch-size {BATCH} --expert-model-parallel-size 2",
            cockpit=False,
        )
    except Captured as captured:
        training.train = train
        return captured.args  # type: ignore[return-value]
    raise AssertionError("pretrain_gpt.py did not call train")


def megatron_block(folder: Path, on: bool) -> Clock:
    """Call Megatron-LM's `train` for `STEPS` steps, with `watch` if `on` is True; return the times of the steps."""
    args, kwargs = megatron(folder.parent)
    import megatron.training.training as training

    from agents.loop.adapters.megatron import watch

    clock, options = Clock(), training.get_args()
    options.iteration = 0
    options.train_iters = STEPS
    train, log = training.train, training.training_log

    def ticking(*args: Any, **kwargs: Any) -> Any:
        clock.tick()
        return log(*args, **kwargs)

    training.training_log = ticking
    if on:
        watch(training.pretrain, run_dir=folder / "run")
    training.train(*args, **kwargs)
    training.get_timers()("interval-time").stop()  # the next call of `train` starts it again
    training.train, training.training_log = train, log
    return clock


@functools.cache
def titan(folder: Path) -> Any:
    """torchtitan's trainer for its debug Llama model."""
    from tests.ranks.adapters.torch_titan import job

    config = job.configured(str(folder), ACCUMULATION)
    config.training.steps, config.checkpoint.enable = STEPS, False
    del config.model_spec.model.layers[1:]
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, job.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    trainer.close = lambda: None  # it is used again
    return trainer


def torchtitan_block(folder: Path, on: bool) -> Clock:
    """Call `train` of torchtitan's trainer once; return the times of its steps. `on`: use the adapter (`watch`)."""
    from agents.loop.adapters.torchtitan import watch

    trainer, clock = titan(folder.parent), Clock()
    trainer.step = 0
    step = trainer.train_step

    def ticking(*args: Any) -> Any:
        result = step(*args)
        clock.tick()
        return result

    trainer.train_step = ticking
    if on:
        watch(trainer, run_dir=folder / "run")
    trainer.train()
    trainer.close()
    trainer.train_step = step
    return clock


KINDS: dict[str, tuple[str, Callable[[Path, bool], Clock]]] = {
    "Trainer": ("transformers", trainer_block),
    "Accelerate": ("accelerate", accelerate_block),
    "Lightning": ("lightning", lightning_block),
    "DeepSpeed": ("deepspeed", deepspeed_block),
    TORCHTITAN: ("torchtitan", torchtitan_block),
    MEGATRON: ("pretrain_gpt", megatron_block),
}
"""By name: the package that must be installed, and the training."""


def work(folder: Path, kinds: list[str], began_s: float) -> None:
    """Run this process as one rank of every training run. Rank 0 writes the measurements, one line per pair of runs,
    with and without the adapter.

    `began_s`: the Unix time at which the benchmark started.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rounds, start_s = 0, time.time()
    while True:
        for kind in kinds:
            both = {}
            for on in (True, False) if rounds % 2 else (False, True):
                both[on] = KINDS[kind][1](folder / f"{kind}-{rounds}-{on}", on).per_step()
            if os.environ["RANK"] == "0":
                with (folder / "found").open("a") as file:
                    file.write(json.dumps([kind, both[True], both[False]]) + "\n")
        rounds += 1
        # The next round starts only if it will probably end within the budget.
        end_s = time.time() + (time.time() - start_s) / rounds
        enough = [rounds >= ROUNDS and end_s > began_s + BUDGET_S]
        dist.broadcast_object_list(enough, src=0)
        if enough[0]:
            return


def main() -> None:
    began_s = time.time()
    kinds = [
        kind
        for kind, (package, _) in KINDS.items()
        if find_spec(package) and (kind in ALONE or find_spec("transformers"))
    ]
    if missing := [kind for kind in KINDS if kind not in kinds]:
        print(f"left out, because not installed: {', '.join(missing)}\n")
    if not kinds:
        return
    found = []
    for together in (
        [kind for kind in kinds if kind not in ALONE],
        *([one] for one in kinds if one in ALONE),
    ):
        found += measured(together, time.time()) if together else []
    print("| adapter | step | pairs | with / without, wall | with / without, CPU | CPU of rank 0, a step |")
    print("|---|---|---|---|---|---|")
    for kind in kinds:
        pairs = [(on, off) for name, on, off in found if name == kind]
        wall, cpu = ([on[n] / off[n] for on, off in pairs] for n in (0, 1))
        extra_ms = median(1e3 * (on[1] - off[1]) for on, off in pairs)
        step_ms = 1e3 * median(off[0] for _, off in pairs)
        print(
            f"| {kind} | {step_ms:.0f} ms | {len(pairs)} | {interval(wall)} | {interval(cpu)} | {extra_ms:+.2f} ms |"
        )
    print(f"\n{time.time() - began_s:.0f} s", flush=True)


def measured(kinds: list[str], began_s: float) -> list[Any]:
    """Run one job. For each pair of runs, returns the adapter's name, and the wall and CPU seconds per step with and
    without the adapter."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [sys.executable, *torchrun, "-m", __name__, folder, ",".join(kinds), str(began_s)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return [json.loads(line) for line in (Path(folder) / "found").read_text().splitlines()]


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3]))
