"""Names and shapes of a model's tensors in the engine and in Hugging Face, with the conversion of each. The
engine's names are those in checkpoints (`engine.checkpoint.state_tensors`), without the prefix `model.`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.checkpoint.huggingface.architectures import PREDICTS
from engine.config.sections.model import Model

Change = Callable[[Tensor], Tensor]


def same(tensor: Tensor) -> Tensor:
    return tensor


def transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous()


def halves_swapped(tensor: Tensor) -> Tensor:
    return tensor.roll(tensor.shape[-1] // 2, -1)


@dataclass(frozen=True)
class Entry:
    """One tensor: its name in the engine (`ours`) and in Hugging Face (`theirs`), its shape in Hugging Face, and the
    conversions in both directions. `optional`: the Hugging Face model may lack the tensor; the engine's tensor is then
    0. `copy`: the Hugging Face tensor is a second copy of an engine tensor that another entry maps. An export writes
    the engine tensor under both names; an import requires that both tensors are equal.
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    to_ours: Change = same
    to_theirs: Change = same
    optional: bool = False
    copy: bool = False


# Names of the parts of a layer with experts: (prefix, gate, up, down of an expert).
EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
OTHER_EXPERTS = ("mlp", "gate_proj", "up_proj", "down_proj")


def entries(model: Model, kind: str) -> Iterator[Entry]:
    """The tensors of a model, in layer order, with their names in the architecture `kind` (a `model_type`)."""
    D = model.d_model
    yield Entry("embedding.weight", "model.embed_tokens.weight", (model.vocab, D))
    for layer in range(model.layers):
        yield from block(model, kind, layer, f"layers.{layer}.")
    yield Entry("norm.weight", "model.norm.weight", (D,))
    if not model.tie_embeddings:
        yield Entry("head.weight", "lm_head.weight", (model.vocab, D))
    for layer in model.prediction_layers if kind in PREDICTS else ():
        yield from prediction(model, kind, layer)


def block(model: Model, kind: str, layer: int, ours: str) -> Iterator[Entry]:
    theirs, D = f"model.layers.{layer}.", model.d_model
    yield Entry(f"{ours}attention_norm.weight", f"{theirs}input_layernorm.weight", (D,))
    attention = latent_attention if model.attention == "mla" else grouped_attention
    yield from attention(model, f"{ours}attention.", f"{theirs}self_attn.")
    yield Entry(f"{ours}mlp_norm.weight", f"{theirs}post_attention_layernorm.weight", (D,))
    if model.has_experts(layer):
        yield from experts(model, kind, f"{ours}mlp.", theirs)
    else:
        yield from mlp(f"{ours}mlp.", f"{theirs}mlp.", D, model.ff)


def prediction(model: Model, kind: str, layer: int) -> Iterator[Entry]:
    """The tensors of a multi-token prediction module, with their names in the released DeepSeek-V3 checkpoint.
    DeepSeek's projection `eh_proj` takes the concatenation [embedding, state], the engine's `joint` takes [state,
    embedding]. In the released checkpoint each module has its own copy of the embedding and of the head."""
    ours, theirs, D = f"mtp.{layer}.", f"model.layers.{layer}.", model.d_model
    yield Entry(f"{ours}embedding_norm.weight", f"{theirs}enorm.weight", (D,))
    yield Entry(f"{ours}state_norm.weight", f"{theirs}hnorm.weight", (D,))
    yield Entry(f"{ours}joint", f"{theirs}eh_proj.weight", (D, 2 * D), halves_swapped, halves_swapped)
    yield from block(model, kind, layer, f"{ours}block.")
    yield Entry(f"{ours}last_norm.weight", f"{theirs}shared_head.norm.weight", (D,))
    head = "embedding.weight" if model.tie_embeddings else "head.weight"
    for whole, part in (("embedding.weight", "embed_tokens"), (head, "shared_head.head")):
        yield Entry(whole, f"{theirs}{part}.weight", (model.vocab, D), optional=True, copy=True)


def grouped_attention(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    D, C = model.d_model, model.head_width
    rows = {"q": model.heads * C, "k": model.kv * C, "v": model.kv * C}
    for name, width in rows.items():
        yield Entry(f"{ours}{name}", f"{theirs}{name}_proj.weight", (width, D))
        if model.biased_qkv:
            yield Entry(f"{ours}{name}_bias", f"{theirs}{name}_proj.bias", (width,))
    yield Entry(f"{ours}o", f"{theirs}o_proj.weight", (D, model.heads * C))
    for name in ("q_norm", "k_norm") if model.qk_norm else ():
        yield Entry(f"{ours}{name}.weight", f"{theirs}{name}.weight", (C,))


def latent_attention(model: Model, ours: str, theirs: str) -> Iterator[Entry]:
    """The tensors of latent attention. DeepSeek rotates pairs of adjacent elements of a head. The engine rotates pairs
    of elements that are half the rotary dimension apart. So the rotary rows of the matrices are reordered, which does
    not change the scores."""
    D, H = model.d_model, model.heads
    q_rank, kv_rank, nope, rope, v = model.latent
    queries = rotary_rows(nope, rope)
    if q_rank:
        yield Entry(f"{ours}q_down", f"{theirs}q_a_proj.weight", (q_rank, D))
        yield Entry(f"{ours}q_norm.weight", f"{theirs}q_a_layernorm.weight", (q_rank,))
        yield Entry(f"{ours}q_up", f"{theirs}q_b_proj.weight", (H * (nope + rope), q_rank), *queries)
    else:
        yield Entry(f"{ours}q", f"{theirs}q_proj.weight", (H * (nope + rope), D), *queries)
    keys = rotary_rows(kv_rank, rope)
    yield Entry(f"{ours}kv_down", f"{theirs}kv_a_proj_with_mqa.weight", (kv_rank + rope, D), *keys)
    yield Entry(f"{ours}kv_norm.weight", f"{theirs}kv_a_layernorm.weight", (kv_rank,))
    yield Entry(f"{ours}kv_up", f"{theirs}kv_b_proj.weight", (H * (nope + v), kv_rank))
    yield Entry(f"{ours}o", f"{theirs}o_proj.weight", (D, H * v))


def rotary_rows(before: int, rope: int) -> tuple[Change, Change]:
    """Two functions that reorder the rows of a weight matrix with any number of heads. In each head, `before` rows
    without rotary encoding precede `rope` rotary rows. The first function puts the even rotary rows before the odd
    ones; the second function restores the original order.
    """

    def order() -> Tensor:  # only when a tensor is converted: a config.json may claim any width
        width = before + rope
        return torch.tensor([*range(before), *range(before, width, 2), *range(before + 1, width, 2)])

    def reordered(tensor: Tensor, rows: Tensor) -> Tensor:
        heads = tensor.view(-1, before + rope, tensor.shape[1])
        return heads[:, rows].flatten(0, 1)

    return lambda tensor: reordered(tensor, order()), lambda tensor: reordered(tensor, order().argsort())


def mlp(ours: str, theirs: str, D: int, width: int) -> Iterator[Entry]:
    yield Entry(f"{ours}gate", f"{theirs}gate_proj.weight", (width, D))
    yield Entry(f"{ours}up", f"{theirs}up_proj.weight", (width, D))
    yield Entry(f"{ours}down", f"{theirs}down_proj.weight", (D, width))


def experts(model: Model, kind: str, ours: str, theirs: str) -> Iterator[Entry]:
    """The tensors of a layer's router and experts. The engine stores an expert's matrix as [in, out], Hugging Face as
    [out, in]."""
    moe, D = model.moe, model.d_model
    assert moe
    part, gate, up, down = EXPERTS.get(kind, OTHER_EXPERTS)
    yield Entry(f"{ours}router.weight", f"{theirs}{part}.gate.weight", (moe.experts, D))
    if "bias" in moe.balances:
        name = f"{theirs}{part}.gate.e_score_correction_bias"
        yield Entry(f"{ours}router.bias", name, (moe.experts,), optional=kind != "deepseek_v3")
    for expert in range(moe.experts):
        at = f"{theirs}{part}.experts.{expert}."
        for name, matrix in (("gate", gate), ("up", up), ("down", down)):
            shape = (D, moe.d_expert) if name == "down" else (moe.d_expert, D)
            yield Entry(
                f"{ours}experts.{name}.{expert}", f"{at}{matrix}.weight", shape, transposed, transposed
            )
    if moe.shared_experts:
        width = moe.shared_experts * moe.d_expert
        yield from mlp(f"{ours}shared.", f"{theirs}{part}.shared_experts.", D, width)
