"""Compares the engine's bf16 training step on one GPU with that of a Hugging Face model of the same size: tokens/s,
MFU, peak memory.

The engine's step is the trainer's whole step, including data loading, metering, the ranks' vote on knob changes and
telemetry records, with fp32 weights. The step with Hugging Face's model is a standard training step: bf16 weights,
SDPA, fused AdamW, the same micro-batches and clipping. So weights, gradients and Adam's two moments take 16 bytes per
parameter in the engine, and 8 bytes in the Hugging Face step. Each configuration runs in its own process, so that the
memory and the failures of one configuration do not affect the next.

python -m tests.bench gpu          all configurations; skipped without a GPU
python -m tests.bench.training.gpu "HF" LAYOUT [KEY=VALUE ...]
                                   one configuration, on the CPU if there is no GPU; prints a line of JSON
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from engine.config.layout import Layout
from engine.config.toml import load
from engine.planner.hardware.peaks import peak_flops, step_flops
from tests.bench.runs import ROOT

LAYOUTS = ("dense-1b", "moe-1b")
OURS, COMPILED, THEIRS, THEIRS_COMPILED = "ours", "ours compiled", "HF", "HF compiled"
WHO = (OURS, COMPILED, THEIRS, THEIRS_COMPILED)
WARM_UP, STEPS = 4, 10
ALL_S, ONE_S = 460.0, 120.0  # time limits: all configurations, one configuration

Step = Callable[[int], object]
Peak = Callable[[], int]


def measure(who: str, layout: Layout) -> dict[str, Any]:
    """Measure one configuration in this process: the median step time and the peak memory of tensors."""
    import torch

    gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if gpu else torch.device("cpu")
    measured: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if gpu else "cpu"}
    try:
        make = ours if who in (OURS, COMPILED) else theirs
        step, peak = make(layout, device, who in (COMPILED, THEIRS_COMPILED))
        marks = []
        for n in range(WARM_UP + STEPS + 1):
            if n >= WARM_UP:
                marks.append(mark(gpu))
            if n < WARM_UP + STEPS:
                step(n)
        if gpu:
            # Once at the end, and not after each step, so that the host can run ahead.
            torch.cuda.synchronize()
        measured["ms"] = median(between(*pair) for pair in pairwise(marks))
        measured["bytes"] = peak()
    except torch.OutOfMemoryError:
        measured["why"] = "out of memory"
    return measured


def mark(gpu: bool) -> Any:
    """A timestamp: the time in ms on a CPU, a CUDA event recorded on the current stream on a GPU."""
    if not gpu:
        return time.perf_counter() * 1e3
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(first: Any, second: Any) -> float:
    """The milliseconds between two timestamps from `mark`."""
    return float(second - first if isinstance(first, float) else first.elapsed_time(second))


def ours(layout: Layout, device: Any, compiled: bool) -> tuple[Step, Peak]:
    import msgspec
    import torch.distributed as dist

    from engine.device import BACKENDS, set_device
    from engine.rendezvous import single_rank_context
    from engine.train.trainer import Trainer

    set_device(device)
    store = single_rank_context(Path(tempfile.gettempdir())).store()
    bound = device if device.type == "cuda" else None
    dist.init_process_group(BACKENDS[device.type], store=store, rank=0, world_size=1, device_id=bound)
    train = msgspec.structs.replace(layout.train, compile=compiled)
    sizes: list[int] = []  # by step, because the trainer resets its memory counter in each step
    trainer = Trainer(
        msgspec.structs.replace(layout, train=train), on_step=lambda record: sizes.append(record.memory_bytes)
    )
    return trainer.train_step, lambda: max(sizes)


def theirs(layout: Layout, device: Any, compiled: bool) -> tuple[Step, Peak]:
    import torch

    from engine.device import DeviceMemory

    micro_batches = layout.knobs.micro_batches
    shape = layout.train.global_batch // micro_batches, layout.model.seq_len
    with device:
        model = hugging_face(layout).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=layout.train.lr, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if compiled else model

    def step(_: int) -> None:
        for _micro_batch in range(micro_batches):
            tokens = torch.randint(0, 256, shape, device=device)
            (forward(input_ids=tokens, labels=tokens).loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), layout.train.grad_clip or 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, DeviceMemory(device)


def hugging_face(layout: Layout) -> Any:
    """Hugging Face's model with the layout's sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    model = layout.model
    sizes: dict[str, Any] = {
        "vocab_size": model.vocab,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv,
        "max_position_embeddings": model.seq_len,
        "tie_word_embeddings": model.tie_embeddings,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if model.moe is None:
        return LlamaForCausalLM(LlamaConfig(intermediate_size=model.ff, **sizes))
    config = MixtralConfig(
        intermediate_size=model.moe.d_expert,
        num_local_experts=model.moe.experts,
        num_experts_per_tok=model.moe.top_k,
        router_aux_loss_coef=layout.knobs.aux_loss_coef,
        output_router_logits=True,
        experts_implementation="grouped_mm",
        **sizes,
    )
    return MixtralForCausalLM(config)


def apart(who: str, path: str, seconds: float) -> dict[str, Any]:
    """Run `measure` in a separate process. Returns the measurements, or under the key `why` the reason why there are
    none."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.bench.training.gpu", who, path]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"why": f"not done in {seconds:.0f} s"}
    if done.returncode:
        return {"why": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:100]}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def row(layout: Layout, who: str, measured: dict[str, Any]) -> str:
    """One row of the Markdown table: the measurements of one layout with the engine or with Hugging Face's model."""
    head = f"| {layout.run.name} | {who} |"
    if "ms" not in measured:
        return f"{head} {measured['why']} | | | |"
    model, seconds = layout.model, measured["ms"] / 1e3
    tokens = layout.train.global_batch * model.seq_len
    pairs = tokens * sum(model.moe.top_k for n in range(model.layers) if model.moe and model.has_experts(n))
    peak = peak_flops(measured["device"], layout.train.precision)
    mfu = f"{step_flops(model, tokens, pairs) / seconds / peak:.1%}" if peak else "·"
    return (
        f"{head} {measured['ms']:.1f} | {tokens / seconds:,.0f} | {mfu} | {measured['bytes'] / 2**30:.1f} |"
    )


def main() -> None:
    import torch

    if not torch.cuda.is_available():
        print("  skipped: no GPU")
        return
    if importlib.util.find_spec("transformers") is None:
        print("  needs transformers: pip install -e '.[bench]'")
        return
    end = time.monotonic() + ALL_S
    print("| layout | who | ms a step | tokens/s | MFU | peak GiB |\n|---|---|---:|---:|---:|---:|")
    for name in LAYOUTS:
        path = str(ROOT / f"layouts/{name}.toml")
        for who in WHO:
            left = end - time.monotonic()
            measured = apart(who, path, min(left, ONE_S)) if left > 0 else {"why": "not run: time limit"}
            print(row(load(path), who, measured), flush=True)


if __name__ == "__main__":
    who, path, *overrides = sys.argv[1:]
    print(json.dumps(measure(who, load(path, overrides))))
