"""Checks of the model: attention, experts, routing, alignment for the grouped GEMM."""

from collections.abc import Iterator

from engine.config.grid import up_to
from engine.config.layout import Layout
from engine.config.sections.model import Model, Moe

# Number of elements in 16 bytes, because each row must be aligned to 16 bytes.
GEMM_ALIGN = {"fp32": 4, "bf16": 8, "fp16": 8}
# Key -> whether it is required.
LATENT = {
    "q_rank": False,
    "kv_rank": True,
    "nope_dim": True,
    "rope_dim": True,
    "v_dim": True,
    "latent_norm_eps": False,
}


def model_refusals(layout: Layout) -> Iterator[str]:
    model, precision = layout.model, layout.train.precision
    if model.moe:
        for name, width in (("model.d_model", model.d_model), ("model.moe.d_expert", model.moe.d_expert)):
            align = GEMM_ALIGN.get(precision, 1)
            if width % align:
                yield (
                    f"{name} = {width} is not aligned for the grouped GEMM of experts in {precision}; "
                    f"legal: a multiple of {align}"
                )
    if not model.own:
        yield from attention_refusals(model)
    if model.max_seq_len and model.seq_len > model.max_seq_len:
        yield (
            f"model.seq_len = {model.seq_len} is longer than model.max_seq_len = {model.max_seq_len}, the "
            f"sliding window of some of the model's layers; legal: {up_to(model.max_seq_len)}"
        )
    if model.moe:
        if model.moe.dense_layers >= model.layers:
            yield (
                f"model.moe.dense_layers = {model.moe.dense_layers} leaves no layer of model.layers = {model.layers} "
                f"for experts; legal: {up_to(model.layers - 1, 0)}, or model.moe = none"
            )
        yield from routing_refusals(model.moe)


def attention_refusals(model: Model) -> Iterator[str]:
    if model.attention == "mla":
        for key, required in LATENT.items():
            if required and getattr(model, key) is None:
                needed = ", ".join(name for name in LATENT if LATENT[name])
                yield f"model.{key} is missing; model.attention = mla requires {needed}"
        for key, neutral in (
            ("head_dim", None),
            ("kv_heads", None),
            ("window", None),
            ("qk_norm", False),
            ("qkv_bias", False),
            ("bias", False),
        ):
            if getattr(model, key) != neutral:
                shown = str(getattr(model, key)).lower()
                yield f"model.{key} = {shown} requires model.attention = gqa; legal: gqa, or no {key}"
    else:
        for key in LATENT:
            if getattr(model, key) is not None:
                yield f"model.{key} = {getattr(model, key)} requires model.attention = mla; legal: mla, or no {key}"
    if model.positions == "learned":
        return
    name, width = (
        ("model.rope_dim", model.rope_dim)
        if model.attention == "mla"
        else ("model.head_dim", model.head_dim)
        if model.head_dim
        else ("model.d_model / model.heads", model.head_width)
    )
    if width and width % 2:
        yield f"{name} = {width} is odd; RoPE rotates pairs; legal: an even number"


def routing_refusals(moe: Moe) -> Iterator[str]:
    top_groups = moe.top_groups or moe.groups
    within = top_groups * moe.experts // moe.groups
    if moe.top_k > moe.experts:
        yield f"model.moe.top_k = {moe.top_k} is more than experts; legal: {up_to(moe.experts)}"
    if top_groups > moe.groups:
        yield f"model.moe.top_groups = {top_groups} is more than groups = {moe.groups}; legal: {up_to(moe.groups)}"
    elif moe.top_k > within:
        yield f"model.moe.top_k = {moe.top_k} is more than the experts of {top_groups} groups; legal: {up_to(within)}"
    if moe.router == "expert_choice":
        # Keys that apply to token choice only, with their neutral values.
        unlike = {
            "balance": "none",
            "drop": "position",
            "groups": 1,
        }
        for key, legal in unlike.items():
            if getattr(moe, key) != legal:
                yield (
                    f"model.moe.{key} = {getattr(moe, key)} cannot be combined with model.moe.router = "
                    f"expert_choice, where all experts get equal shares; legal: {legal}"
                )
