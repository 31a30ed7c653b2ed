"""Model FLOPs, computed by hand and compared with torch's count in a real step; peak FLOP/s of devices."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from engine import device
from engine.config.knob_values import KnobValues
from engine.config.sections.model import Model
from engine.config.toml import load
from engine.metering.meter import Meter
from engine.model.loss import cross_entropy
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from engine.planner.hardware.peaks import PEAKS, peak_flops, step_flops
from tests.ranks.cases.cases import SMALL
from tests.unit.engine.config.test_layout import DEMO

T = 1e12


@pytest.mark.parametrize(
    ("name", "precision", "rate"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_a_known_device_has_its_dense_peak(name: str, precision: str, rate: float) -> None:
    assert peak_flops(name, precision) == rate * T


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 D",
        "",
    ],
)
def test_an_unknown_device_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None


def test_a_smaller_precision_is_never_slower() -> None:
    assert all(peak.bf16 >= peak.tf32 >= peak.fp32 for peak in PEAKS.values())
    assert peak_flops("NVIDIA H200", "fp8") is None  # the engine does not train in fp8


def test_a_cpu_has_no_peak() -> None:
    assert device.matmul_peak(device.CPU, "bf16") is None


def test_fp32_with_tf32_allowed_has_the_tf32_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-40GB")
    gpu = torch.device("cuda", 0)
    assert device.matmul_peak(gpu, "fp32") == 19.5 * T
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert device.matmul_peak(gpu, "fp32") == 156 * T


def test_a_dense_model_by_hand() -> None:
    model = Model(layers=3, d_model=8, heads=4, kv_heads=2, seq_len=10, d_ff=12, vocab=300)
    q_and_o, k_and_v, mlp = 2 * 8 * 8, 2 * 8 * 4, 3 * 8 * 12
    attention = 10 / 2 * 8 * 2  # scores and output, each over half of the sequence on average
    per_token = 3 * (q_and_o + k_and_v + mlp + attention) + 8 * 300
    assert step_flops(model, tokens=20, pairs=0) == 6 * 20 * per_token


def test_a_mixture_by_hand() -> None:
    """Layers 0 and 2 have experts. 20 tokens choose 2 experts in each of the 2 layers, and 5 of these token-expert
    pairs are dropped."""
    layout = load(
        DEMO,
        [
            *["grid.pp=1", "grid.dp_shard=1", "grid.tp=1", "grid.ep=1", "model.layers=3", "model.d_model=8"],
            *["model.heads=2", "model.kv_heads=2", "model.seq_len=12", "model.d_ff=12", "model.moe.every=2"],
            *[
                "model.moe.experts=4",
                "model.moe.d_expert=16",
                "model.moe.shared_experts=1",
                "train.global_batch=8",
            ],
        ],
    )
    attention = 4 * 8 * 8 + 12 * 8
    mixture, dense = 8 * 4 + 3 * 8 * 16, 3 * 8 * 12  # router and shared expert; MLP
    pairs = 20 * 2 * 2 - 5
    per_token = 3 * attention + 2 * mixture + dense + 8 * 256
    assert step_flops(layout.model, 20, pairs) == 6 * (20 * per_token + pairs * 3 * 8 * 16)


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.moe=none", "model.kv_heads=1"],
        ["model.tie_embeddings=true"],
        ["model.moe.shared_experts=2", "model.moe.top_k=3", "model.moe.every=2"],
        ["model.layers=3", "model.moe.dense_layers=1", "model.moe.every=2", "model.moe.balance=aux+bias"],
        ["knobs.capacity_factor=0.5"],
        ["model.moe.router=expert_choice", "model.moe.balance=none", "knobs.capacity_factor=1.5"],
    ],
    ids=["grouped-query", "tied", "shared, every second", "dense first", "drops", "expert choice"],
)
def test_torch_counts_the_same(overrides: list[str]) -> None:
    """Compares the FLOPs with PyTorch's count of all matrix products in a forward and a backward pass. PyTorch counts
    all attention scores, but model FLOPs include only the half that the causal mask leaves visible."""
    layout = load(DEMO, [*SMALL, *overrides])
    model, meter = layout.model, Meter(layout.model.layers, 8)
    tp, ep = Axis("tp", None, meter), Axis("ep", None, meter)
    # in fp64 the experts are plain matrix products, which torch can count
    torch.set_default_dtype(torch.float64)
    try:
        stage = Stage(ParameterFactory(1, tp, ep), model, range(model.layers), KnobValues.of(layout), meter)
        tokens = torch.randint(0, 256, (4, model.seq_len), generator=torch.Generator().manual_seed(5))
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = cross_entropy(stage(tokens), tokens, tp)
        forward = split_attention(counter)
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        backward = split_attention(counter)
    finally:
        torch.set_default_dtype(torch.float32)
    pairs = int(meter.readings.load.sum() - meter.readings.dropped.sum())
    asked = step_flops(model, tokens.numel(), pairs)
    assert forward[0] + forward[1] / 2 == asked / 3
    assert backward == (2 * forward[0], 2 * forward[1])


def split_attention(counter: FlopCounterMode) -> tuple[int, int]:
    """The FLOPs of all operations except attention, and the FLOPs of attention."""
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if "bmm" in str(op))
    return sum(counts.values()) - attention, attention
