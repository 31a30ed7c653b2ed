"""A config.json means what it means in transformers: each key absent, in each architecture, and back after an export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.huggingface.architectures import ARCHITECTURES, architecture_of, config_of, model_of
from engine.checkpoint.huggingface.exporting import export_checkpoint
from engine.checkpoint.huggingface.importing import import_folder
from engine.config.refusal import RefusedError
from engine.config.sections.model import Model
from engine.config.toml import LAYOUT_FILE, load
from tests.unit.engine.checkpoint import transformers_defaults
from tests.unit.engine.checkpoint.test_huggingface import STEP, ours, refused, tokens
from tests.unit.engine.checkpoint.tiny_models import COMMON, LENGTH, MODELS, saved_model

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'train-cockpit[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[4]
Json = dict[str, Any]
# Values that no default equals, so that an absent key makes a difference.
FULL: dict[str, Json] = {
    "mistral": {"sliding_window": 7},
    "mixtral": MODELS["mixtral"] | {"sliding_window": 9, "num_local_experts": 6, "num_experts_per_tok": 3},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": MODELS["qwen3"] | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3_moe": MODELS["qwen3_moe"] | {"use_sliding_window": True, "sliding_window": 6, "decoder_sparse_step": 2},
    "deepseek_v3": MODELS["deepseek_v3"]
    | {"rms_norm_eps": 1e-3, "n_routed_experts": 32, "n_group": 16, "topk_group": 5, "num_experts_per_tok": 7}
    | {"routed_scaling_factor": 1.5},
}  # fmt: skip
LARGE = (
    3_000_000  # parameters; models with the defaults of large keys are compared by their configuration only
)


def full_config(kind: str, **more: Any) -> Json:
    """config.json of a tiny model, with every key that transformers writes."""
    from transformers import AutoConfig

    values = {**COMMON, "rms_norm_eps": 1e-4, **FULL.get(kind, {}), **more}
    config: Json = json.loads(AutoConfig.for_model(kind, **values).to_json_string(use_diff=False))
    derived = {"layer_types", *(("head_dim", "qk_head_dim") if kind == "deepseek_v3" else ())}
    return {key: value for key, value in config.items() if key not in derived}


def theirs(config: Json) -> Any:
    """The configuration that transformers reads from `config`."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[config["model_type"]].from_dict(config)


def described(config: Any) -> Json:
    """The engine's keys for a configuration object of transformers, from its attributes."""
    kind, layers = config.model_type, range(config.num_hidden_layers)
    found: Json = {
        "layers": config.num_hidden_layers,
        "d_model": config.hidden_size,
        "heads": config.num_attention_heads,
        "vocab": config.vocab_size,
        "norm_eps": config.rms_norm_eps,
        "tie_embeddings": config.tie_word_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "window": config.sliding_window if kind in ("mistral", "mixtral") else None,
        "seq_len": min(4096, config.max_position_embeddings),
        "max_seq_len": None,
    }
    if kind.startswith("qwen") and config.sliding_window is not None:
        if kind == "qwen3_moe" or "sliding_attention" in config.layer_types:
            found["max_seq_len"] = config.sliding_window
            found["seq_len"] = min(found["seq_len"], config.sliding_window)
    if kind == "deepseek_v3":
        found |= {
            "latent": (
                config.q_lora_rank or 0,
                config.kv_lora_rank,
                config.qk_nope_head_dim,
                config.qk_rope_head_dim,
                config.v_head_dim,
            ),
            "experts": config.n_routed_experts,
            "d_expert": config.moe_intermediate_size,
            "shared_experts": config.n_shared_experts,
            "groups": config.n_group,
            "top_groups": config.topk_group,
            "route_scale": config.routed_scaling_factor,
            "with_experts": [n for n in layers if n >= config.first_k_dense_replace],
        }
    else:
        found["kv"] = config.num_key_value_heads
        found["head_width"] = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
    if kind != "mixtral":
        found["ff"] = config.intermediate_size
    if kind == "mixtral":
        found |= {"experts": config.num_local_experts, "d_expert": config.intermediate_size}
    if kind == "qwen3_moe":
        found |= {
            "experts": config.num_experts,
            "d_expert": config.moe_intermediate_size,
            "with_experts": [
                n
                for n in layers
                if n not in config.mlp_only_layers and (n + 1) % config.decoder_sparse_step == 0
            ],
        }
    if "experts" in found:
        found["top_k"] = config.num_experts_per_tok
    return found


def values_of(model: Model, keys: Json) -> Json:
    found: Json = {"with_experts": list(model.layers_with_experts)}
    for key in keys:
        if key != "with_experts":
            found[key] = getattr(model, key) if hasattr(model, key) else getattr(model.moe, key)
    return {key: found[key] for key in keys}


def test_the_defaults_are_those_of_transformers() -> None:
    written = (ROOT / "engine/checkpoint/huggingface/defaults.json").read_text()
    assert written == transformers_defaults.text(), transformers_defaults.__doc__


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_absent_key_has_the_default_of_its_architecture(kind: str) -> None:
    """For each key of a config.json, and for all keys at once: without it, the engine's model is that of transformers'
    configuration object."""
    whole = full_config(kind)
    compared, without = 0, [{key} for key in whole if key != "model_type"]
    for absent in [set(), *without, set(whole) - {"model_type"}]:
        config = {key: value for key, value in whole.items() if key not in absent}
        wanted = described(theirs(config))
        try:
            model = model_of(config, "config.json")
        except RefusedError as refusal:
            assert absent in ({"norm_topk_prob"}, set(whole) - {"model_type"}) and kind == "qwen3_moe"
            assert "norm_topk_prob = false is not supported" in str(refusal)
            continue
        assert values_of(model, wanted) == wanted, absent
        compared += 1
    assert compared > 20


QUICK = {("mixtral", "rope_parameters"), ("deepseek_v3", "topk_group"), ("mistral", "sliding_window")}
KEYS = [
    (kind, key)
    for kind, architecture in ARCHITECTURES.items()
    for key in sorted(
        {*architecture.keys.values(), *architecture.moe.values(), *architecture.only, "rope_parameters"}
        | {"use_sliding_window", "max_window_layers", "mlp_only_layers", "decoder_sparse_step"}
    )
]


@pytest.mark.parametrize(
    ("kind", "key"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.exhaustive) for case in KEYS],
)
def test_logits_without_a_key_equal_those_of_transformers(kind: str, key: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = full_config(kind)
    names = (
        {key, "num_experts", "num_local_experts"} if key in ("num_experts", "num_local_experts") else {key}
    )
    if not names & whole.keys():
        pytest.skip("this architecture has no such key")
    config = {name: value for name, value in whole.items() if name not in names}
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(theirs(config)).parameters())
    if size > LARGE:
        pytest.skip(f"{size:,} parameters")
    saved = saved_from(config, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    try:
        import_folder(tmp_path / "hf", tmp_path / "run", [])
    except RefusedError as refusal:
        assert key == "norm_topk_prob" and "norm_topk_prob = false" in str(refusal)
        return
    stage = ours(tmp_path / "run" / STEP)
    length = min(LENGTH, load(tmp_path / "run" / LAYOUT_FILE).model.seq_len)
    with torch.no_grad():
        torch.testing.assert_close(
            stage(tokens()[:, :length]), saved(tokens()[:, :length]).logits, rtol=1e-4, atol=2e-5
        )


def saved_from(config: Json, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(theirs(config), attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "bias")):
                tensor.add_(0.2 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    return model
