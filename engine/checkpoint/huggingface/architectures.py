"""The Hugging Face architectures that the engine reads and writes, and the conversion between their `config.json` and
the [model] section of a layout file. Torch-free.

To add an architecture, add an entry to ARCHITECTURES and a case to `tests/unit/engine/checkpoint/test_huggingface.py`.
If its tensors have other names than those of the existing architectures, add these names to
`engine.checkpoint.huggingface.tensors`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import msgspec
from msgspec import Struct

from engine.config.refusal import OWN_MODEL, RefusedError, shown
from engine.config.sections.model import Model, Moe

Config = dict[str, Any]

LONGEST = 4096  # default of model.seq_len, if the model supports longer sequences


@dataclass(frozen=True)
class Architecture:
    """How a Hugging Face config.json of one `model_type` describes a model. `keys` and `moe` map the engine's keys to
    those of config.json. `has`: layout keys whose value the architecture fixes, with this value; keys of [model.moe]
    have the prefix `moe.`. `only`: keys of config.json for which only one value is supported."""

    name: str  # class in transformers
    keys: Mapping[str, str]
    moe: Mapping[str, str] = field(default_factory=dict)
    has: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)


class Absent(Struct, frozen=True):
    """What the configuration class of an architecture says about keys of config.json. `defaults`: the value of each key
    that is absent. `aliases`: other name of a key -> its name in `defaults`."""

    defaults: Config
    aliases: dict[str, str]


# Generated from transformers (tests/unit/engine/checkpoint/transformers_defaults.py).
ABSENT = msgspec.json.decode(
    resources.files(__package__).joinpath("defaults.json").read_bytes(), type=dict[str, Absent]
)

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
USUAL = {"hidden_act": "silu", "attention_dropout": 0.0}
SOFTMAX = {"moe.score": "softmax"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "LlamaForCausalLM", DENSE, only=USUAL | {"attention_bias": False, "mlp_bias": False}
    ),
    "mistral": Architecture("MistralForCausalLM", DENSE | WINDOW, only=USUAL),
    "qwen2": Architecture("Qwen2ForCausalLM", DENSE, has={"qkv_bias": True}, only=USUAL),
    "qwen3": Architecture(
        "Qwen3ForCausalLM", DENSE, has={"qk_norm": True}, only=USUAL | {"attention_bias": False}
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        MIXTRAL | WINDOW,
        {"experts": "num_local_experts", "top_k": "num_experts_per_tok", "d_expert": "intermediate_size"},
        has=SOFTMAX,
        only=USUAL | {"router_jitter_noise": 0.0},
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        DENSE,
        {"experts": "num_experts", "top_k": "num_experts_per_tok", "d_expert": "moe_intermediate_size"},
        has=SOFTMAX | {"qk_norm": True},
        only=USUAL | {"attention_bias": False, "norm_topk_prob": True},
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
        # In transformers, rms_norm_eps does not apply to the norms of the latents.
        has={"attention": "mla", "moe.score": "sigmoid", "moe.balance": "bias", "latent_norm_eps": 1e-6},
        only=USUAL | {"attention_bias": False, "norm_topk_prob": True, "rope_interleave": True},
    ),
}

# Keys that no configuration class lists and that change the model, with the value that they have if they are absent.
# transformers reads the first three; the others are in configurations of code outside transformers.
UNLISTED: dict[str, Any] = {
    "is_causal": True,
    "per_layer_config": None,
    "quantization_config": None,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
}
PREDICTS = {"deepseek_v3"}  # architectures with multi-token prediction modules
PREDICTIONS = ("num_nextn_predict_layers", "num_mtp_layers")  # keys with the number of these modules
NULLS = {"num_key_value_heads", "head_dim", "sliding_window", "q_lora_rank"}  # keys that may be null

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
    kind, architecture = architecture_of(config, where)
    config = _complete(config, kind, where)
    for key, legal in {**architecture.only, **UNLISTED}.items():
        if config[key] != legal:
            raise RefusedError(
                f"{where}: {key} = {_spelled(config[key])} is not supported; legal: {_spelled(legal)}"
            )
    read = [*architecture.keys.values(), *architecture.moe.values()]
    for key in read:
        if config[key] is None and key not in NULLS:
            raise RefusedError(f"{where}: {key} = null is not legal; legal: a value, or no {key}")
    heads = config["num_attention_heads"]
    if kind == "deepseek_v3" and config["num_key_value_heads"] not in (None, heads):
        raise RefusedError(
            f"{where}: num_key_value_heads = {_spelled(config['num_key_value_heads'])} is not supported with "
            f"num_attention_heads = {_spelled(heads)}; legal: the same number"
        )
    if kind == "deepseek_v3" and config["head_dim"] not in (None, config["qk_rope_head_dim"]):
        raise RefusedError(
            f"{where}: head_dim = {_spelled(config['head_dim'])} is not supported; legal: qk_rope_head_dim, or none"
        )
    values = {key: config[theirs] for key, theirs in architecture.keys.items()}
    limit = _partial_window(config, kind, where)
    values |= {"rope_theta": _rope_theta(config, where), "max_seq_len": limit}
    values["seq_len"] = _seq_len(config, limit, where)
    values |= {key: value for key, value in architecture.has.items() if not key.startswith("moe.")}
    if architecture.moe:
        moe = {key: config[theirs] for key, theirs in architecture.moe.items()}
        moe |= {key[4:]: value for key, value in architecture.has.items() if key.startswith("moe.")}
        values["moe"] = moe | _layers_with_experts(config, kind, where)
    try:
        model = msgspec.convert(values, Model)
    except msgspec.ValidationError as error:
        raise RefusedError(f"{where} does not describe a model: {error}") from None
    _check_routing(model.moe, where)
    return model


def _complete(config: Config, kind: str, where: str) -> Config:
    """`config` with the default of each key that is absent, and without aliases."""
    absent = ABSENT[kind]
    complete = {"head_dim": None, **UNLISTED, **absent.defaults, **config}
    for alias, name in absent.aliases.items():
        if alias in config:
            if config.get(name, config[alias]) != config[alias]:
                raise RefusedError(
                    f"{where}: {alias} = {_spelled(config[alias])} and {name} = {_spelled(config[name])} are names of "
                    "one value; legal: one of them"
                )
            complete[name] = config[alias]
    return complete


def config_of(model: Model, dtype: str, imported: Config | None = None) -> Config:
    """The content of config.json for `model`. `imported`: config.json of the model from which the training started; all
    of its keys are kept that say nothing else than `model` (such as the ids of special tokens). Otherwise the
    architecture is one that can represent all of the model's settings. Raises RefusedError if no architecture can
    describe the model."""
    if model.own:
        raise RefusedError(OWN_MODEL.format(model.implementation, "Hugging Face's format"))
    if imported:
        try:
            model_of(imported, "")
        except RefusedError:  # it comes from a file that anybody may have changed
            imported = None
    lost_by: dict[str, list[str]] = {}
    for config in _candidates(model, imported):
        name = ARCHITECTURES[config["model_type"]].name
        try:
            back = _facts(model_of(config, name))
        except RefusedError:  # for example, the model has no experts and the architecture has some
            continue
        ours = _facts(model)
        lost = [key for key in {**ours, **back} if ours.get(key) != back.get(key)]
        if not lost:
            return config | {"dtype": dtype, "torch_dtype": dtype}
        lost_by[name] = [f"model.{key} = {_spelled(ours.get(key))}" for key in lost]
    name, lost = min(lost_by.items(), key=lambda row: len(row[1]))
    raise RefusedError(
        f"no Hugging Face architecture that the engine writes describes this model; {name}, the nearest, "
        f"has no "
        f"{', '.join(lost[:4])}"
    )


def _candidates(model: Model, imported: Config | None) -> Iterator[Config]:
    """Contents of config.json that may describe `model`, the best first."""
    if imported:
        kind = imported["model_type"]
        absent = ABSENT[kind]
        # The files of `auto_map` (code outside transformers) are not part of a checkpoint.
        kept = {key: value for key, value in imported.items() if key != "auto_map"}
        if model.seq_len > {**absent.defaults, **kept}["max_position_embeddings"]:
            kept["max_position_embeddings"] = model.seq_len
        if model.mtp_layers and kind in PREDICTS:
            kept = {key: value for key, value in kept.items() if key not in PREDICTIONS}
            kept[PREDICTIONS[0]] = model.mtp_layers
        yield kept
        yield {key: value for key, value in kept.items() if key not in absent.aliases} | _config(kind, model)
    for kind, architecture in ARCHITECTURES.items():
        yield {
            "architectures": [architecture.name],
            "model_type": kind,
            **_config(kind, model),
            **({PREDICTIONS[0]: model.mtp_layers} if kind in PREDICTS else {}),
            "max_position_embeddings": model.seq_len,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
        }


def _config(kind: str, model: Model) -> Config:
    """The keys of config.json that describe the model, in the architecture `kind`."""
    architecture = ARCHITECTURES[kind]
    config: Config = {theirs: getattr(model, key) for key, theirs in architecture.keys.items()}
    config |= {"num_key_value_heads": model.kv}
    if model.attention == "gqa":
        config["head_dim"] = model.head_width
    if "d_ff" in architecture.keys:
        config["intermediate_size"] = model.ff
    for key, theirs in architecture.moe.items() if model.moe else ():
        config[theirs] = getattr(model.moe, key)
    if kind == "qwen3_moe" and model.moe:
        experts, step = model.layers_with_experts, model.moe.every
        regular = list(experts) == [n for n in range(model.layers) if (n + 1) % step == 0]
        config["decoder_sparse_step"] = step if regular else 1
        config["mlp_only_layers"] = [n for n in range(model.layers) if not regular and n not in experts]
    if kind == "deepseek_v3" and model.moe:
        config["topk_group"] = model.moe.top_groups or model.moe.groups
    return config | {
        **architecture.only,
        "rope_theta": model.rope_theta,  # transformers 4 reads this key; version 5 reads rope_parameters
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
    }


def _facts(model: Model) -> dict[str, Any]:
    """A dict of the configuration keys, with their values, that determine which function a model computes. Two models
    that compute the same function have equal dicts, even if one sets a default explicitly and the other omits it."""
    facts: dict[str, Any] = msgspec.to_builtins(model)
    moe = facts.pop("moe") or {}
    facts |= {f"moe.{key}": value for key, value in moe.items()}
    if model.attention == "gqa":
        facts |= {"kv_heads": model.kv, "head_dim": model.head_width}
    experts = list(model.layers_with_experts)
    latent_eps = model.latent_norm_eps or model.norm_eps
    facts["latent_norm_eps"] = latent_eps if model.attention == "mla" else None
    facts["d_ff"] = model.ff if len(experts) < model.layers else None
    if model.moe:
        facts |= {"moe.dense_layers": experts, "moe.every": None}
        limited = (model.moe.top_groups or model.moe.groups) < model.moe.groups
        facts["moe.groups"] = model.moe.groups if limited else 1
        facts["moe.top_groups"] = model.moe.top_groups if limited else 1
    return {key: value for key, value in facts.items() if key not in OF_TRAINING}


def _rope_theta(config: Config, where: str) -> float:
    """The base of the RoPE frequencies (theta). Refuses scaled frequencies. Version 5 of transformers stores the base
    in rope_parameters. Version 4 stores the base in rope_theta and the scaling in rope_scaling, which version 5 reads
    instead of rope_parameters if it is there.
    """
    for name in ("rope_parameters", "rope_scaling"):
        section = config.get(name) or {}
        if not isinstance(section, dict):
            raise RefusedError(f"{where}: {name} = {shown(section)} is not legal; legal: an object")
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise RefusedError(
                f"{where}: rope scaling {shown(kind)} is not supported; legal: none, with "
                "sequences that are no longer than in pre-training"
            )
        for key, value in section.items():
            if isinstance(value, dict):
                raise RefusedError(
                    f"{where}: {name} has frequencies of its own for {shown(key)}; legal: one rope_theta for all layers"
                )
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config["rope_theta"])
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if (
        not isinstance(theta, int | float)
        or isinstance(theta, bool)
        or not 0 < theta <= 1e9
        or partial not in (None, 1.0)
    ):
        raise RefusedError(
            f"{where}: rope_theta = {shown(theta)} with a rotary part of {shown(partial)} is not legal"
        )
    return float(theta)


def _seq_len(config: Config, limit: int | None, where: str) -> int:
    """The default of model.seq_len: `max_position_embeddings`, but at most `LONGEST` and `limit`."""
    longest = config["max_position_embeddings"]
    if not isinstance(longest, int) or longest < 1:
        raise RefusedError(f"{where}: max_position_embeddings is not a positive whole number")
    return min(LONGEST, longest, limit or LONGEST)


def _partial_window(config: Config, kind: str, where: str) -> int | None:
    """The sliding window that Qwen's config.json enables, or None. Qwen's models use the window in only some of their
    layers; the engine computes the same as long as no sequence is longer than the window."""
    if "use_sliding_window" not in ABSENT[kind].defaults:
        return None
    used, window, layers = (
        config[key] for key in ("use_sliding_window", "sliding_window", "num_hidden_layers")
    )
    first, types = config.get("max_window_layers", 0), config.get("layer_types")
    if not isinstance(used, bool) or not isinstance(first, int) or not isinstance(layers, int):
        raise RefusedError(
            f"{where}: use_sliding_window = {_spelled(used)} and max_window_layers = {_spelled(first)} are not legal; "
            "legal: true or false, and a whole number"
        )
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise RefusedError(f"{where}: sliding_window = {_spelled(window)} is not a positive whole number")
    if kind == "qwen3_moe":  # all layers, whatever the other keys say
        windowed = True
    elif types is None:
        windowed = first < layers
    else:
        if not isinstance(types, list) or not all(
            one in ("full_attention", "sliding_attention") for one in types
        ):
            raise RefusedError(
                f"{where}: layer_types = {shown(types)} is not supported; legal: a list of full_attention and "
                "sliding_attention"
            )
        windowed = "sliding_attention" in types
        if windowed and not (used and window):
            raise RefusedError(
                f"{where}: layer_types has sliding_attention without use_sliding_window and sliding_window; legal: both"
            )
    return window if used and windowed else None


def _layers_with_experts(config: Config, kind: str, where: str) -> Config:
    """The layout keys `dense_layers` and `every`, derived from the config.json keys with which Qwen selects the layers
    that have experts."""
    if "decoder_sparse_step" not in ABSENT[kind].defaults:
        return {}
    layers, step = config["num_hidden_layers"], config["decoder_sparse_step"]
    dense = config["mlp_only_layers"] or []
    if not isinstance(layers, int) or not 0 < layers <= 1024 or not isinstance(step, int) or step < 1:
        raise RefusedError(f"{where}: num_hidden_layers or decoder_sparse_step is not a legal number")
    if not isinstance(dense, list) or not all(isinstance(n, int) for n in dense):
        raise RefusedError(f"{where}: mlp_only_layers = {shown(dense)} is not a list of whole numbers")
    dense = set(dense)
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
