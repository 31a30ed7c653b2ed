"""The Hugging Face architectures that the engine reads and writes, and the conversion between their `config.json` and
the [model] section of a layout file. Torch-free.

To add an architecture, add an entry to ARCHITECTURES and a case to `tests/unit/engine/checkpoint/test_huggingface.py`.
If its tensors have other names than those of the existing architectures, add these names to
`engine.checkpoint.huggingface.tensors`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.config.refusal import OWN_MODEL, RefusedError, shown
from engine.config.sections.model import Model, Moe

Config = dict[str, Any]

LONGEST = 4096  # default of model.seq_len, if the model supports longer sequences


@dataclass(frozen=True)
class Architecture:
    """How a Hugging Face config.json of one `model_type` describes a model. `keys` and `moe` map the engine's keys to
    those of config.json. `has`: layout keys whose value the architecture fixes, with this value; keys of [model.moe]
    have the prefix `moe.`. `only`: keys of config.json for which only one value is supported. `absent`: defaults for
    keys that may be missing from a config.json."""

    name: str  # class in transformers
    keys: Mapping[str, str]
    moe: Mapping[str, str] = field(default_factory=dict)
    has: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)


COMMON = {
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
DENSE = COMMON | {"kv_heads": "num_key_value_heads", "d_ff": "intermediate_size", "head_dim": "head_dim"}
MIXTRAL = {key: theirs for key, theirs in DENSE.items() if key != "d_ff"}
LATENT = COMMON | {
    "d_ff": "intermediate_size",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}
WINDOW = {"window": "sliding_window"}
SILU = {"hidden_act": "silu"}
ABSENT = {"hidden_act": "silu", "tie_word_embeddings": False, "head_dim": None}
SOFTMAX = {"moe.score": "softmax"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM",
        DENSE,
        only=SILU | {"attention_bias": False, "mlp_bias": False},
        absent=ABSENT | {"rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
    ),
    "mistral": Architecture(
        "MistralForCausalLM",
        DENSE | WINDOW,
        only=SILU,
        absent=ABSENT | {"rms_norm_eps": 1e-6, "sliding_window": 4096},
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM",
        DENSE,
        has={"qkv_bias": True},
        only=SILU,
        absent=ABSENT | {"rms_norm_eps": 1e-6},
    ),
    "qwen3": Architecture(
        "Qwen3ForCausalLM",
        DENSE,
        has={"qk_norm": True},
        only=SILU | {"attention_bias": False},
        absent=ABSENT | {"rms_norm_eps": 1e-6, "attention_bias": False, "head_dim": 128},
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        MIXTRAL | WINDOW,
        {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "d_expert": "intermediate_size"},
        has=SOFTMAX,
        only=SILU,
        absent=ABSENT | {"rms_norm_eps": 1e-5},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        DENSE,
        {"experts": "num_experts", "top_k": "num_experts_per_tok", "d_expert": "moe_intermediate_size"},
        has=SOFTMAX | {"qk_norm": True},
        only=SILU | {"attention_bias": False, "norm_topk_prob": True},
        absent=ABSENT | {"rms_norm_eps": 1e-6, "attention_bias": False, "norm_topk_prob": False},
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        LATENT,
        {
            "experts": "n_routed_experts",
            "top_k": "num_experts_per_tok",
            "d_expert": "moe_intermediate_size",
            "shared_experts": "n_shared_experts",
            "dense_layers": "first_k_dense_replace",
            "groups": "n_group",
            "top_groups": "topk_group",
            "route_scale": "routed_scaling_factor",
        },
        has={"attention": "mla", "moe.score": "sigmoid", "moe.balance": "bias"},
        # In transformers, the norms of the latents always have the epsilon 1e-6; rms_norm_eps does not change it.
        only=SILU
        | {"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True, "rms_norm_eps": 1e-6},
        absent=ABSENT
        | {"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True, "rms_norm_eps": 1e-6}
        | {"q_lora_rank": None},
    ),
}

RENAMED = {"num_local_experts": "num_experts"}  # key in some releases of transformers -> key in others

# Keys of the engine's model that only training uses, so that no config.json has them.
OF_TRAINING = {"seq_len", "mtp_layers", "moe.balance", "moe.drop"}


def architecture_of(config: Config, where: str) -> tuple[str, Architecture]:
    """The `model_type` of a config.json, and the entry of ARCHITECTURES for this type. Raises RefusedError."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise RefusedError(
            f"{where}: model_type = {shown(kind)} is not an architecture that the engine trains; legal: "
            f"{', '.join(ARCHITECTURES)}"
        )
    return kind, ARCHITECTURES[kind]


def model_of(config: Config, where: str) -> Model:
    """The model that a config.json describes. Raises RefusedError for anything that the engine would compute
    differently. `where` is the name of the file in error messages."""
    _, architecture = architecture_of(config, where)
    for name, other in RENAMED.items():
        if name in config and other in architecture.moe.values():
            config = {other: config[name], **config}
    config = {**architecture.absent, **config}
    for key, legal in architecture.only.items():
        if config.get(key) != legal:
            raise RefusedError(
                f"{where}: {key} = {_spelled(config.get(key))} is not supported; legal: {_spelled(legal)}"
            )
    if config.get("quantization_config") is not None:
        raise RefusedError(f"{where}: quantized weights are not supported; legal: fp32, fp16 or bf16 weights")
    values = {key: config.get(theirs) for key, theirs in architecture.keys.items()}
    values |= {"rope_theta": _rope_theta(config, where), "seq_len": _seq_len(config, where)}
    values |= {key: value for key, value in architecture.has.items() if not key.startswith("moe.")}
    if architecture.moe:
        moe = {key: config.get(theirs) for key, theirs in architecture.moe.items()}
        moe |= {key[4:]: value for key, value in architecture.has.items() if key.startswith("moe.")}
        values["moe"] = moe | _layers_with_experts(config, where, moe)
    try:
        model = msgspec.convert(values, Model)
    except msgspec.ValidationError as error:
        raise RefusedError(f"{where} does not describe a model: {error}") from None
    _check_routing(model.moe, where)
    return model


def config_of(model: Model, dtype: str) -> Config:
    """The content of config.json for `model`, in an architecture that can represent all of the model's settings. Raises
    RefusedError if no architecture can describe the model."""
    if model.own:
        raise RefusedError(OWN_MODEL.format(model.implementation, "Hugging Face's format"))
    lost_by: dict[str, list[str]] = {}
    for kind, architecture in ARCHITECTURES.items():
        config = _config(kind, architecture, model, dtype)
        try:
            back = _facts(model_of(config, kind))
        except RefusedError:  # for example, the model has no experts and the architecture has some
            continue
        ours = _facts(model)
        lost = [key for key in {**ours, **back} if ours.get(key) != back.get(key)]
        if not lost:
            return config
        lost_by[architecture.name] = [f"model.{key} = {_spelled(ours.get(key))}" for key in lost]
    name, lost = min(lost_by.items(), key=lambda row: len(row[1]))
    raise RefusedError(
        f"no Hugging Face architecture that the engine writes describes this model; {name}, the nearest, "
        f"has no "
        f"{', '.join(lost[:4])}"
    )


def _config(kind: str, architecture: Architecture, model: Model, dtype: str) -> Config:
    gqa = model.attention == "gqa"
    config: Config = {"architectures": [architecture.name], "model_type": kind}
    for key, theirs in architecture.keys.items():
        config[theirs] = getattr(model, key)
    config |= {"num_key_value_heads": model.kv}
    if gqa:
        config["head_dim"] = model.head_width
    if "d_ff" in architecture.keys:
        config["intermediate_size"] = model.ff
    for key, theirs in architecture.moe.items() if model.moe else ():
        config[theirs] = getattr(model.moe, key)
    if kind == "qwen3_moe" and model.moe:
        config |= {"decoder_sparse_step": model.moe.every, "mlp_only_layers": []}
        if model.moe.every == 1:
            config["mlp_only_layers"] = list(range(model.moe.dense_layers))
    if kind == "deepseek_v3" and model.moe:
        config["topk_group"] = model.moe.top_groups or model.moe.groups
        config["num_nextn_predict_layers"] = model.mtp_layers
    config |= architecture.only
    config |= {
        "max_position_embeddings": model.seq_len,
        "rope_theta": model.rope_theta,  # transformers 4 reads this key; version 5 reads rope_parameters
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    return config


def _facts(model: Model) -> dict[str, Any]:
    """A dict of the configuration keys, with their values, that determine which function a model computes. Two models
    that compute the same function have equal dicts, even if one sets a default explicitly and the other omits it."""
    facts: dict[str, Any] = msgspec.to_builtins(model)
    moe = facts.pop("moe") or {}
    facts |= {f"moe.{key}": value for key, value in moe.items()}
    if model.attention == "gqa":
        facts |= {"kv_heads": model.kv, "head_dim": model.head_width}
    experts = list(model.layers_with_experts)
    facts["d_ff"] = model.ff if len(experts) < model.layers else None
    if model.moe:
        facts |= {"moe.dense_layers": experts, "moe.every": None}
        limited = (model.moe.top_groups or model.moe.groups) < model.moe.groups
        facts["moe.groups"] = model.moe.groups if limited else 1
        facts["moe.top_groups"] = model.moe.top_groups if limited else 1
    return {key: value for key, value in facts.items() if key not in OF_TRAINING}


def _rope_theta(config: Config, where: str) -> float:
    """The base of the RoPE frequencies (theta). Refuses scaled frequencies. Version 5 of transformers stores the base
    in rope_parameters. Version 4 stores the base in rope_theta and the scaling in rope_scaling.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for name, section in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(section, dict):
            raise RefusedError(f"{where}: {name} = {shown(section)} is not legal; legal: an object")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise RefusedError(
                f"{where}: rope scaling {shown(kind)} is not supported; legal: none, with "
                "sequences that are no longer than in pre-training"
            )
    theta = parameters.get("rope_theta", config.get("rope_theta", 10_000.0))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if not isinstance(theta, int | float) or isinstance(theta, bool) or partial != 1.0:
        raise RefusedError(
            f"{where}: rope_theta = {shown(theta)} with a rotary part of {shown(partial)} is not legal"
        )
    return float(theta)


def _seq_len(config: Config, where: str) -> int:
    """The default of model.seq_len: `max_position_embeddings`, but at most `LONGEST` and, if only some layers use a
    sliding window, at most the window's length."""
    longest = config.get("max_position_embeddings")
    windowed = window_of(config)
    lengths = [n for n in (LONGEST, longest, windowed or None) if n is not None]
    if not all(isinstance(n, int) and n > 0 for n in lengths):
        raise RefusedError(
            f"{where}: max_position_embeddings or sliding_window is not a positive whole number"
        )
    return min(lengths)


def window_of(config: Config) -> int | None:
    """The sliding window that Qwen's config.json enables, or None. Qwen's models use the window in only some of their
    layers; the engine does not support this."""
    window = config.get("use_sliding_window") and config.get("sliding_window")
    return window if isinstance(window, int) and window else None


def _layers_with_experts(config: Config, where: str, moe: Config) -> Config:
    """The layout keys `dense_layers` and `every`, derived from the config.json keys with which Qwen selects the layers
    that have experts."""
    layers, step, dense = (
        config.get("num_hidden_layers"),
        config.get("decoder_sparse_step", 1),
        config.get("mlp_only_layers") or [],
    )
    if "dense_layers" in moe:
        return {}
    if not isinstance(layers, int) or not 0 < layers <= 1024 or not isinstance(step, int) or step < 1:
        raise RefusedError(f"{where}: num_hidden_layers or decoder_sparse_step is not a legal number")
    if not isinstance(dense, list):
        raise RefusedError(f"{where}: mlp_only_layers = {shown(dense)} is not a list")
    routed = [n for n in range(layers) if n not in dense and (n + 1) % step == 0]
    for every in range(1, layers + 1):
        if routed and routed == list(range(routed[0], layers, every)):
            return {"dense_layers": routed[0], "every": every}
    raise RefusedError(
        f"{where}: mlp_only_layers and decoder_sparse_step put experts into irregularly spaced layers; "
        f"legal: leading "
        "layers without experts, then every n-th layer with experts"
    )


def _check_routing(moe: Moe | None, where: str) -> None:
    """Raises RefusedError if the engine would route tokens or weight experts differently from transformers."""
    if moe is None:
        return
    if moe.top_k == 1:
        raise RefusedError(
            f"{where}: num_experts_per_tok = 1 is not supported, because transformers gives the expert the "
            f"weight 1 and the engine its score; legal: 2 or more"
        )
    limited = (moe.top_groups or moe.groups) < moe.groups
    if limited and -(-moe.top_k // (moe.top_groups or 1)) != 2:
        raise RefusedError(
            f"{where}: transformers ranks groups by their 2 best experts, the engine ranks them by their "
            f"num_experts_per_tok / "
            f"topk_group = {moe.top_k} / {moe.top_groups} best; legal: a ratio above 1 and at most 2"
        )


def _spelled(value: Any) -> str:
    """The text for a value of config.json in error messages."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return shown(value)


def kinds() -> Iterator[str]:
    """The names of the architectures, for the help texts of commands."""
    return (row.name.removesuffix("ForCausalLM") for row in ARCHITECTURES.values())
