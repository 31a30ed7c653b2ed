"""Published transformers for tests of the planner's counts, from their papers and public configurations."""

from dataclasses import replace

from engine.planner.workload.transformer import (
    Attention,
    Dense,
    Experts,
    LatentAttention,
    Layer,
    Transformer,
)


def gpt(layers: int, d_model: int, heads: int, vocab: int, positions: int) -> Transformer:
    """GPT-2 and GPT-3 have LayerNorm, biases, learned position embeddings, an MLP of width 4 D without a gate, and a
    tied head."""
    attention = Attention(heads, heads, d_model // heads, bias=True)
    layer = Layer(attention, Dense(4 * d_model, gated=False, bias=True))
    return Transformer(d_model, vocab, (layer,) * layers, True, norm_parameters=2, positions=positions)


def llama(layers: int, d_model: int, heads: int, kv: int, ff: int, vocab: int) -> Transformer:
    return Transformer(d_model, vocab, (Layer(Attention(heads, kv, d_model // heads), Dense(ff)),) * layers)


def mixtral(layers: int, d_model: int, heads: int, ff: int, vocab: int) -> Transformer:
    return Transformer(d_model, vocab, (Layer(Attention(heads, 8, 128), Experts(8, 2, ff)),) * layers)


def deepseek(
    layers: int, dense: int, d_model: int, mixer: LatentAttention, ff: int, experts: Experts, vocab: int
) -> Transformer:
    first, rest = Layer(mixer, Dense(ff)), Layer(mixer, experts)
    return Transformer(d_model, vocab, (first,) * dense + (rest,) * (layers - dense))


GPT3 = gpt(96, 12288, 96, 50257, 2048)  # arXiv 2005.14165, table 2.1
LLAMA2_7B = llama(32, 4096, 32, 32, 11008, 32000)
LLAMA2_70B = llama(80, 8192, 64, 8, 28672, 32000)  # arXiv 2307.09288
LLAMA3_405B = llama(126, 16384, 128, 8, 53248, 128256)  # arXiv 2407.21783, table 3
MIXTRAL_8X7B = mixtral(32, 4096, 32, 14336, 32000)  # arXiv 2401.04088, table 1
MIXTRAL_8X22B = mixtral(56, 6144, 48, 16384, 32768)
DEEPSEEK_V2 = deepseek(  # arXiv 2405.04434, section 3.1.2
    60,
    1,
    5120,
    LatentAttention(128, 1536, 512, 128, 64, 128),
    12288,
    Experts(160, 6, 1536, 2 * 1536, groups=8, top_groups=3),
    102400,
)
DEEPSEEK_V3 = replace(  # arXiv 2412.19437, section 4.2
    deepseek(
        61,
        3,
        7168,
        LatentAttention(128, 1536, 512, 128, 64, 128),
        18432,
        Experts(256, 8, 2048, 2048, groups=8, top_groups=4),
        129280,
    ),
    mtp_layers=1,
)
KIMI_K2 = deepseek(  # arXiv 2507.20534, table 2
    61, 1, 7168, LatentAttention(64, 1536, 512, 128, 64, 128), 18432, Experts(384, 8, 2048, 2048), 163840
)
QWEN3_235B = Transformer(  # arXiv 2505.09388, table 2
    4096, 151936, (Layer(Attention(64, 4, 128, qk_norm=True), Experts(128, 8, 1536)),) * 94
)
