"""The models in the published tables of step times, each with the source of its sizes."""

import re
from dataclasses import replace

from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    LatentAttention,
    Layer,
    StateSpace,
    Transformer,
)

NO_MODEL = {
    "DeepSeekV4 Flash": "its compressed sparse attention and hyper-connections are not among the planner's layers",
}


def gpt(layers: int, width: int, heads: int, vocab: int, positions: int, bias: bool = True) -> Transformer:
    """GPT-2 and GPT-3 have LayerNorm, learned positions, an MLP four times as wide as the model, and a head tied to the
    embedding."""
    attention = Attention(heads, heads, width // heads, bias=bias)
    layer = Layer(attention, Dense(4 * width, gated=False, bias=bias))
    return Transformer(width, vocab, (layer,) * layers, True, norm_parameters=2, positions=positions)


def mpt(size: str, positions: int) -> Transformer:
    """MosaicML's MPT without biases (llm-foundry, scripts/train/benchmarking). The parameter counts equal those in the
    column NumParams of llm_foundry.csv."""
    layers, width, heads = {
        "125m": (12, 768, 12),
        "350m": (24, 1024, 16),
        "760m": (24, 1536, 12),
        "1b": (24, 2048, 16),
        "3b": (32, 2560, 20),
        "7b": (32, 4096, 32),
        "13b": (40, 5120, 40),
        "30b": (48, 7168, 56),
        "70b": (80, 8192, 64),
    }[size]
    return replace(gpt(layers, width, heads, 50368, positions, bias=False), norm_parameters=1)


def llama(layers: int, width: int, heads: int, kv: int, hidden: int, vocab: int) -> Transformer:
    return Transformer(width, vocab, (Layer(Attention(heads, kv, width // heads), Dense(hidden)),) * layers)


def nemotron4(layers: int, width: int, heads: int, hidden: int) -> Transformer:
    """Nemotron-4: squared ReLU without a gate, vocabulary 256000 (arXiv 2402.16819, table 1; arXiv 2406.11704, table
    1)."""
    layer = Layer(Attention(heads, 8, width // heads), Dense(hidden, gated=False))
    return Transformer(width, 256000, (layer,) * layers, norm_parameters=2)


def routed(layers: int, width: int, attention: Attention, experts: Experts, vocab: int) -> Transformer:
    return Transformer(width, vocab, (Layer(attention, experts),) * layers)


def deepseek(layers: int, dense: int, heads: int, experts: Experts, vocab: int, mtp: int = 0) -> Transformer:
    """DeepSeek-V3 and Kimi K2, whose latent attention has the same dimensions. The first layers have a dense FFN with
    an intermediate size of 18432."""
    mixer = LatentAttention(heads, 1536, 512, 128, 64, 128)
    first, rest = Layer(mixer, Dense(18432)), Layer(mixer, experts)
    return Transformer(7168, vocab, (first,) * dense + (rest,) * (layers - dense), mtp_layers=mtp)


def gpt_oss(layers: int, experts_of_a_layer: int) -> Transformer:
    """Attention of every second layer is limited to a window of 128 tokens (model card of gpt-oss, arXiv 2508.10925,
    section 2)."""
    experts = Experts(experts_of_a_layer, 4, 2880)
    near, far = (
        Layer(Attention(64, 8, 64, window, bias=True, sinks=True), experts) for window in (128, None)
    )
    return Transformer(2880, 201088, (near, far) * (layers // 2))


def maverick() -> Transformer:
    """Llama 4 Maverick: every second layer has experts, and in three of every four layers attention is limited to
    chunks of 8192 tokens (public configuration)."""
    dense, experts = Dense(16384), Experts(128, 1, 8192, shared_hidden=8192)
    attention = Attention(40, 8, 128)
    return Transformer(5120, 202048, (Layer(attention, dense), Layer(attention, experts)) * 24)


def hybrid(
    width: int,
    vocab: int,
    counts: tuple[int, int, int],
    mixers: tuple[StateSpace, Attention],
    mlp: Dense | Experts,
) -> Transformer:
    """A model with separate state-space, feed-forward and attention layers; the layers of each kind are spread evenly
    over the model. `counts`: three numbers of layers, state-space, feed-forward and attention. Without a pipeline, the
    order of the layers does not affect the times."""
    scan, attention = mixers
    kinds = (Layer(scan, None), Layer(None, mlp), Layer(attention, None))
    places = sorted((n / count, kind) for kind, count in enumerate(counts) for n in range(count))
    return Transformer(width, vocab, tuple(kinds[kind] for _, kind in places))


NEMOTRON_H_56B = hybrid(  # arXiv 2504.03624, table 1
    8192,
    131072,
    (54, 54, 10),
    (StateSpace(256, 64, 8, 256), Attention(64, 8, 128)),
    Dense(32768, gated=False),
)
NEMOTRON_3_NANO = hybrid(  # arXiv 2512.20848, table 1; public configuration of 30B-A3B
    2688,
    131072,
    (23, 23, 6),
    (StateSpace(64, 64, 8, 128), Attention(32, 2, 128)),
    Experts(128, 6, 1856, shared_hidden=3712, gated=False),
)
NEMOTRON_3_SUPER = hybrid(  # public configuration of 120B-A12B
    4096,
    131072,
    (40, 40, 8),
    (StateSpace(128, 64, 8, 128), Attention(32, 2, 128)),
    Experts(512, 22, 2688, shared_hidden=5376, gated=False, latent=1024),
)
NEMOTRON_3_ULTRA = hybrid(  # public configuration of 550B-A55B
    8192,
    131072,
    (48, 48, 12),
    (StateSpace(256, 64, 8, 128), Attention(64, 2, 128)),
    Experts(512, 22, 5120, shared_hidden=10240, gated=False, latent=2048),
)
V3_EXPERTS = Experts(256, 8, 2048, 2048, groups=8, top_groups=4)
DEEPSEEK_V3 = deepseek(61, 3, 128, V3_EXPERTS, 129280)  # arXiv 2412.19437, section 4.2
DEEPSEEK_V3_MTP = deepseek(61, 3, 128, V3_EXPERTS, 129280, mtp=1)
KIMI_K2 = deepseek(61, 1, 64, Experts(384, 8, 2048, 2048), 163840)  # arXiv 2507.20534, table 2
QWEN3_30B = routed(48, 2048, Attention(32, 4, 128, qk_norm=True), Experts(128, 8, 768), 151936)
QWEN3_235B = routed(94, 4096, Attention(64, 4, 128, qk_norm=True), Experts(128, 8, 1536), 151936)
# arXiv 2407.10671, table 1: a token uses 8 of 64 experts; the shared experts have width 20480.
QWEN2_57B = routed(
    28, 3584, Attention(28, 4, 128, bias=True), Experts(64, 8, 2560, shared_hidden=20480), 151936
)
GROK_1 = routed(64, 6144, Attention(48, 8, 128), Experts(8, 2, 32768), 131072)  # xai-org/grok-1, run.py
MIXTRAL_8X22B = routed(56, 6144, Attention(48, 8, 128), Experts(8, 2, 16384), 32768)
MIXTRAL_G8T8 = (
    routed(  # arXiv 2504.14960, section 4.1: 64 experts with an eighth of the width; a token uses 8
        56, 6144, Attention(48, 8, 128), Experts(64, 8, 2048), 32768
    )
)
LLAMA3_8X70B = routed(80, 8192, Attention(64, 8, 128), Experts(8, 2, 28672), 128256)  # the same section
LLAMA3_8B = llama(32, 4096, 32, 8, 14336, 128256)  # arXiv 2407.21783, table 3
LLAMA3_70B = llama(80, 8192, 64, 8, 28672, 128256)
LLAMA3_405B = llama(126, 16384, 128, 8, 53248, 128256)
KEMPNER = {  # KempnerForge: Llama 3's vocabulary, 8 KV heads, FFN multiplier 1.3; the MFU of the rows agrees
    "7b": llama(32, 4096, 32, 8, 14336, 128256),
    "13b": llama(40, 5120, 40, 8, 17920, 128256),
}

MODELS = {
    "deepseek-v3": DEEPSEEK_V3,
    "DeepSeekV3": DEEPSEEK_V3_MTP,
    "DeepSeekV3 (w/o MTP)": DEEPSEEK_V3,
    "DeepSeekV3 (w/ MTP)": DEEPSEEK_V3_MTP,
    "DeepSeekV3 (tokendrop)": DEEPSEEK_V3_MTP,
    "DeepSeekV3 (dropless)": DEEPSEEK_V3_MTP,
    "kimi-k2": KIMI_K2,
    "Kimi_K2": KIMI_K2,
    "qwen3-235b": QWEN3_235B,
    "Qwen3_235B_a22B": QWEN3_235B,
    "Qwen3_235B_a22B (tokendrop)": QWEN3_235B,
    "Qwen3_30B_a3B": QWEN3_30B,
    "Qwen3_30B_a3B (tokendrop)": QWEN3_30B,
    "qwen2-57b-a14b": QWEN2_57B,
    "mixtral-8x22b": MIXTRAL_8X22B,
    "mixtral-g8t8": MIXTRAL_G8T8,
    "llama3-8x70b": LLAMA3_8X70B,
    "grok1-314b": GROK_1,
    "gpt3-175b": gpt(96, 12288, 96, 51200, 2048),
    "nemotron4-15b": nemotron4(32, 6144, 48, 24576),
    "nemotron4-340b": nemotron4(96, 18432, 96, 73728),
    "nemotron-h-56b": NEMOTRON_H_56B,
    "nemotron3-ultra-550b": NEMOTRON_3_ULTRA,
    "Nemotron_3_Nano": NEMOTRON_3_NANO,
    "Nemotron_3_Super": NEMOTRON_3_SUPER,
    "Nemotron_3_Ultra": NEMOTRON_3_ULTRA,
    "GPT OSS 120B": gpt_oss(36, 128),
    "GPT OSS 20B": gpt_oss(24, 32),
    "LLAMA3_8B": LLAMA3_8B,
    "LLAMA3_70B": LLAMA3_70B,
    "llama3.1-405b": LLAMA3_405B,
    "llama4-maverick-400b": maverick(),
    "mixtral-8x7b": routed(32, 4096, Attention(32, 8, 128), Experts(8, 2, 14336), 32000),
    "llama3.1-8b": LLAMA3_8B,
    "llama3.1-70b": LLAMA3_70B,
    "LLAMA3.1_405B": LLAMA3_405B,
    "NemotronH 56B": NEMOTRON_H_56B,
    "qwen3-30b": QWEN3_30B,
    "nemotron3-nano-30b": NEMOTRON_3_NANO,
    "nemotron3-super-120b": NEMOTRON_3_SUPER,
}
SUFFIXES = re.compile(r"(pretrain|a3b|a22b|a12b|a55b|v1)$")


def _plain(name: str) -> str:
    return SUFFIXES.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


PLAIN = {_plain(name): model for name, model in MODELS.items()}


def find(name: str) -> Transformer | None:
    """The model with this name, or None if its sizes are not known. Case, punctuation and suffixes such as `pretrain`
    are ignored."""
    base = re.sub(r" \((tokendrop|dropless)\)", "", name)
    return MODELS.get(name) or PLAIN.get(_plain(base))


def model(name: str) -> Transformer:
    """The model with this name; fails if the name is not known."""
    found = find(name)
    assert found is not None, name
    return found
