"""A config.json means what it means in transformers: each key absent, in each architecture; and an export."""

import json
import tracemalloc
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.checkpoint.huggingface.architectures import ARCHITECTURES, config_of, model_of
from engine.checkpoint.huggingface.exporting import export_checkpoint
from engine.checkpoint.huggingface.importing import import_folder
from engine.checkpoint.huggingface.tensors import entries
from engine.checkpoint.manifest import MANIFEST
from engine.checkpoint.resume_point import find_start
from engine.config.refusal import RefusedError
from engine.config.sections.model import Model
from engine.config.toml import LAYOUT_FILE, load
from engine.sampling.settings import sampling_layout
from engine.train.batches.corpus import read_text, validation_text

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'train-cockpit[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed")
# After the checks: a test module that was skipped cannot be imported.
from tests.unit.engine.checkpoint import transformers_defaults
from tests.unit.engine.checkpoint.test_hostile_checkpoint import sign
from tests.unit.engine.checkpoint.test_huggingface import STEP, ours, refused, tokens
from tests.unit.engine.checkpoint.tiny_models import COMMON, LENGTH, MODELS, saved_model

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
    windowed = kind == "qwen3_moe" or "sliding_attention" in getattr(config, "layer_types", ())
    if kind.startswith("qwen") and config.sliding_window is not None and windowed:
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


def expected(kind: str, absent: set[str]) -> str:
    """The refusal of a config without these keys: transformers' default is one that the engine does not support, or,
    for the heads of DeepSeek-V3, one with which transformers fails."""
    if kind == "qwen3_moe" and "norm_topk_prob" in absent:
        return "norm_topk_prob = false is not supported"
    assert kind == "deepseek_v3" and absent <= {"num_attention_heads", "num_key_value_heads"}, absent
    return "is not supported with num_attention_heads"


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
            assert expected(kind, absent) in str(refusal)
            continue
        assert values_of(model, wanted) == wanted, absent
        compared += 1
    assert compared > 20


WITH: dict[str, Json] = {  # key -> values of other keys with which its default is legal
    "num_attention_heads": {"hidden_size": 64},
    "num_key_value_heads": {"hidden_size": 64, "num_attention_heads": 32},
    "num_experts_per_tok": {"num_local_experts": 12, "n_routed_experts": 32},
    "first_k_dense_replace": {"num_hidden_layers": 4},
}
QUICK = {("mixtral", "rope_parameters")}
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

    fields = full_config(kind)
    whole = full_config(kind, **{name: value for name, value in WITH.get(key, {}).items() if name in fields})
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
        import_folder(
            tmp_path / "hf", tmp_path / "run", ["model.seq_len=24"] * (key == "max_position_embeddings")
        )
    except RefusedError as refusal:
        assert expected(kind, {key}) in str(refusal)
        return
    stage = ours(tmp_path / "run" / STEP)
    length = min(LENGTH, load(tmp_path / "run" / LAYOUT_FILE).model.seq_len)
    with torch.no_grad():
        torch.testing.assert_close(
            stage(tokens()[:, :length]), saved(tokens()[:, :length]).logits, rtol=1e-4, atol=1e-4
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


# The released config.json of Moonlight-16B-A3B, the smallest public model of DeepSeek-V3's kind.
MOONLIGHT = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}, "aux_loss_alpha": 0.001,
    "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264, "kv_lora_rank": 512,
    "max_position_embeddings": 8192, "model_type": "deepseek_v3", "moe_intermediate_size": 1408, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def test_moonlight_is_imported() -> None:
    """Its norms have the epsilon 1e-5, those of the latents 1e-6; its parameters are those of transformers."""
    from transformers import AutoModelForCausalLM

    model = model_of(MOONLIGHT, "config.json")
    wanted = described(theirs(MOONLIGHT))
    assert values_of(model, wanted) == wanted
    assert (model.norm_eps, model.latent_norm_eps) == (1e-5, 1e-6)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(theirs(MOONLIGHT)).state_dict()
    found = sum(prod(entry.shape) for entry in entries(model, "deepseek_v3"))
    assert found == sum(tensor.numel() for tensor in tensors.values()) == 15_960_110_208
    back = config_of(model, "bfloat16", MOONLIGHT)
    assert back == {k: v for k, v in MOONLIGHT.items() if k != "auto_map"} | {"dtype": "bfloat16"}


OTHER = {  # name of a model -> further keys of its config.json
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3, "tie_word_embeddings": True},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 20, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    "qwen3_moe step": {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "mistral windowed", "mixtral", "deepseek_v3", *OTHER])
def test_an_export_has_the_config_of_the_import(name: str, tmp_path: Path) -> None:
    """The sequences of training, and a run that neither knows nor needs the other keys, do not change the config."""
    more: Json = {
        "bos_token_id": 5,
        "eos_token_id": [6, 7],
        "pad_token_id": 8,
        "max_position_embeddings": 4321,
    }
    kind = name.split()[0]
    if name == "qwen3_moe":
        more["num_hidden_layers"] = 5  # experts in layer 3 only
    saved_model(kind, tmp_path / "hf", **more | OTHER.get(name, {}))
    import_folder(tmp_path / "hf", tmp_path / "run", ["model.seq_len=16"])
    export_checkpoint(tmp_path / "run", tmp_path / "back", "fp32")
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("hf", "back"))
    assert after == before | {"torch_dtype": "float32"}


def test_a_model_of_the_engine_has_the_keys_of_its_architecture(tmp_path: Path) -> None:
    """Experts in any layers that the engine can describe have a config.json, also without an import."""
    for dense, every in ((0, 1), (1, 2), (2, 2), (3, 2), (2, 1), (4, 3)):
        model = model_of(
            full_config("qwen3_moe", num_hidden_layers=6, use_sliding_window=False), "config.json"
        )
        assert model.moe
        model = structs.replace(model, moe=structs.replace(model.moe, dense_layers=dense, every=every))
        config = config_of(model, "float32")
        assert described(theirs(config))["with_experts"] == list(range(dense, 6, every))


def test_training_for_longer_sequences_is_in_the_config() -> None:
    model = model_of(full_config("llama"), "config.json")
    longer = structs.replace(model, seq_len=2 * LENGTH)
    assert config_of(longer, "float32", full_config("llama"))["max_position_embeddings"] == 2 * LENGTH


@pytest.mark.parametrize("changed", [{}, {"model_type": "gpt2"}, {"rope_theta": "x"}, {"hidden_size": 64}])
def test_a_config_in_a_checkpoint_is_checked(changed: Json) -> None:
    """A manifest may have been edited: the exported config.json describes the model of the checkpoint all the same."""
    model = model_of(full_config("llama"), "config.json")
    found = config_of(model, "float32", full_config("llama") | {"rope_parameters": {}} | changed)
    wanted = described(theirs(full_config("llama")))
    assert described(theirs(found)) == wanted


def test_a_head_of_its_own_is_used_in_spite_of_the_config(tmp_path: Path) -> None:
    """If a file has an lm_head.weight that differs from the embedding, transformers uses it, whatever
    tie_word_embeddings says; if it is equal, the weights are tied."""
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    saved_model("llama tied", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    for head, untied in (
        (tensors["model.embed_tokens.weight"] * 1.0, False),
        (tensors["model.embed_tokens.weight"].flip(0), True),
    ):
        save_file(tensors | {"lm_head.weight": head.contiguous()}, path, metadata={"format": "pt"})
        run = tmp_path / f"run-{untied}"
        assert import_folder(tmp_path / "hf", run, []).untied is untied
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
        with torch.no_grad():
            wanted = model(tokens()).logits
            torch.testing.assert_close(ours(run / STEP)(tokens()), wanted, rtol=1e-4, atol=2e-5)
            export_checkpoint(run, tmp_path / f"back-{untied}", "fp32")
            again = AutoModelForCausalLM.from_pretrained(
                tmp_path / f"back-{untied}", dtype=torch.float32
            ).eval()
            assert torch.equal(again(tokens()).logits, wanted)
    save_file(tensors | {"lm_head.weight": torch.zeros(7, 32)}, path)
    refused(tmp_path, "lm_head.weight has the shape [7, 32], but config.json implies [300, 32]")


def test_a_resumed_run_keeps_the_sliding_window(tmp_path: Path) -> None:
    """Neither longer sequences nor another limit are accepted when a run starts from the imported checkpoint."""
    saved_model("qwen2", tmp_path / "hf", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    import_folder(tmp_path / "hf", tmp_path / "run", [])
    layout = tmp_path / "run" / LAYOUT_FILE
    assert (load(layout).model.seq_len, load(layout).model.max_seq_len) == (16, 16)
    with pytest.raises(RefusedError, match=r"model.seq_len = 24 is longer than model.max_seq_len = 16"):
        load(layout, ["model.seq_len=24"])
    bypassed = load(layout, ["model.seq_len=24", "model.max_seq_len=none"])
    with pytest.raises(RefusedError, match=r"has model.max_seq_len = 16, the layout has none"):
        find_start(bypassed, tmp_path / "run", None, tmp_path / "new", False)
    assert find_start(
        load(layout, ["model.seq_len=8"]), tmp_path / "run", None, tmp_path / "new", False
    ).checkpoint


def test_qwen2_has_the_window_of_its_class() -> None:
    config = full_config("qwen2", max_position_embeddings=8192)
    del config["sliding_window"]
    assert model_of(config, "config.json").max_seq_len == 4096  # the default of Qwen2Config


def test_a_small_vocabulary_is_trained_on_token_shards(tmp_path: Path) -> None:
    """A model with fewer tokens than bytes is imported, and refused only where bytes are read: in training and in
    validation."""
    saved_model("llama", tmp_path / "hf", vocab_size=100)
    import_folder(tmp_path / "hf", tmp_path / "run", [])
    layout = load(tmp_path / "run" / LAYOUT_FILE)
    with pytest.raises(
        RefusedError, match=r"data.source = 'stdlib' has byte tokens, but model.vocab = 100; legal"
    ):
        read_text(layout)
    shards = ["data.source=shards", 'data.shards=["x"]', "validation.every=1", "validation.source=stdlib"]
    with pytest.raises(
        RefusedError, match=r"validation.source = 'stdlib' has byte tokens, but model.vocab = 100"
    ):
        validation_text(load(tmp_path / "run" / LAYOUT_FILE, shards))
    assert sampling_layout(layout, []).model.vocab == 100


def test_a_config_allocates_nothing_that_the_files_do_not_have(tmp_path: Path) -> None:
    """A config.json of 250 bytes claims 1024 layers of 65,536 experts, or a matrix with 2^30 rows: the import stops at
    the first missing tensor."""
    save = pytest.importorskip("safetensors.torch").save_file
    (tmp_path / "hf").mkdir()
    experts = {
        "model_type": "mixtral",
        "num_hidden_layers": 1024,
        "num_local_experts": 65536,
        "intermediate_size": 4,
    }
    experts |= {"num_attention_heads": 8}
    heads = {
        "model_type": "deepseek_v3",
        "num_attention_heads": 2**10,
        "qk_rope_head_dim": 2**20,
        "n_group": 1,
    }
    heads |= {"topk_group": 1, "num_hidden_layers": 4, "q_lora_rank": None, "num_key_value_heads": None}
    for config, width in ((experts, 32), (heads, 1024)):
        whole = config | {"hidden_size": width, "vocab_size": 300}
        (tmp_path / "hf" / "config.json").write_text(json.dumps(whole))
        tensors = {
            "model.embed_tokens.weight": (300, width),
            "model.layers.0.input_layernorm.weight": (width,),
        }
        save(
            {name: torch.ones(shape) for name, shape in tensors.items()},
            tmp_path / "hf" / "model.safetensors",
        )
        tracemalloc.start()
        refused(tmp_path, "lacks the tensor model.layers.0.self_attn.q_proj.weight")
        assert tracemalloc.get_traced_memory()[1] < 2**22
        tracemalloc.stop()


def test_an_export_allocates_nothing_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    saved_model("mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", [])
    path = tmp_path / "run" / STEP / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["layout"]["model"]["layers"] = 1024
    manifest["layout"]["model"]["moe"]["experts"] = 65536
    path.write_text(json.dumps(manifest))
    sign(tmp_path / "run" / STEP)
    tracemalloc.start()
    with pytest.raises(RefusedError, match="has the shape"):
        export_checkpoint(tmp_path / "run", tmp_path / "back", "fp32")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()
