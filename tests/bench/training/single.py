"""Compares the engine's training step with that of Hugging Face's Mixtral of equal size, both in one process: forward,
backward, gradient clipping, AdamW.

The engine's step is the trainer's whole step, including data loading, metering, the ranks' vote on knob changes and
telemetry records, with and without `train.compile`. Mixtral is measured with each of the two expert implementations in
`KINDS`. All configurations use fp32, SDPA attention, the balancing loss and the same batch size, and their steps
alternate.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from engine.launch.processes.local_ranks import launch
from engine.rendezvous import RankContext

# batched_mm is left out: it copies an expert for each token and takes 30 times as long at these sizes.
KINDS = ("eager", "grouped_mm")
OURS, COMPILED = "ours", "ours compiled"
ROUNDS, WARM_UP = 12, 2
SIZES = [  # layers, d_model, heads, seq_len, experts, d_expert, sequences
    (4, 64, 4, 64, 8, 128, 32),
    (4, 256, 8, 256, 8, 512, 8),
]
LAYOUT = """
model = {{layers = {0}, d_model = {1}, heads = {2}, kv_heads = 2, seq_len = {3}, moe = {{experts = {4}, top_k = 2, d_expert = {5}}}}}
train = {{steps = 1000, global_batch = {6}, grad_clip = 1.0}}
"""  # noqa: E501 - TOML's inline tables stand on one line


def measure(context: RankContext) -> None:
    import torch
    import torch.distributed as dist

    from engine.config.toml import from_toml
    from engine.train.trainer import Trainer

    torch.set_num_threads(2)
    dist.init_process_group("gloo", store=context.store(), rank=0, world_size=1)
    for sizes in SIZES:
        text = LAYOUT.format(*sizes)
        contestants: dict[str, Callable[[int], object]] = {
            OURS: Trainer(from_toml(text)).train_step,
            COMPILED: Trainer(from_toml(text, ["train.compile=true"])).train_step,
        }
        contestants |= {kind: mixtral(kind, *sizes) for kind in KINDS}
        took: dict[str, list[float]] = {who: [] for who in contestants}
        worked: dict[str, list[float]] = {who: [] for who in contestants}
        for n in range(WARM_UP + ROUNDS):
            for who, step in contestants.items():
                begin, began = time.perf_counter(), time.process_time()
                step(n)
                took[who].append(time.perf_counter() - begin)
                worked[who].append(time.process_time() - began)
        ms = {who: median(times[WARM_UP:]) * 1e3 for who, times in took.items()}
        best = min(KINDS, key=ms.__getitem__)
        print(
            f"  {dict(zip(('layers', 'd', 'heads', 'S', 'experts', 'd_expert', 'batch'), sizes, strict=True))}"
        )
        print("   ", ", ".join(f"{who} {value:.0f} ms" for who, value in ms.items()))
        for ours, other in ((OURS, best), (COMPILED, OURS)):
            ratios = [
                f"{median(a / b for a, b in list(zip(spent[ours], spent[other], strict=True))[WARM_UP:]):.3f}"
                for spent in (took, worked)
            ]
            print(f"    {ours} / {other}: {ratios[0]}; of CPU time {ratios[1]}", flush=True)
    dist.destroy_process_group()


def mixtral(
    kind: str, layers: int, width: int, heads: int, length: int, experts: int, d_expert: int, batch: int
) -> Callable[[int], object]:
    """A function that runs a standard training step of Mixtral."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=d_expert,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        num_local_experts=experts,
        num_experts_per_tok=2,
        max_position_embeddings=length,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
        use_cache=False,
        attn_implementation="sdpa",
        experts_implementation=kind,
    )
    model = MixtralForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
    coin = torch.Generator().manual_seed(0)

    def step(_: int) -> None:
        tokens = torch.randint(0, 256, (batch, length), generator=coin)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    if importlib.util.find_spec("transformers") is None:
        print("  needs transformers: pip install -e '.[bench]'")
        return
    with tempfile.TemporaryDirectory() as folder:
        launch(1, measure, name_of_rank=str, hub="none", run="bench", run_dir=Path(folder))
