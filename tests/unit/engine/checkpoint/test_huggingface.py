"""Import and export of Hugging Face models: logits and generated text equal those of transformers."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.checkpoint.huggingface.exporting import export_checkpoint
from engine.checkpoint.huggingface.importing import import_folder
from engine.checkpoint.reading import damage, read
from engine.checkpoint.storage import read_tensor
from engine.checkpoint.tensor_index import read_index
from engine.config.knob_values import KnobValues
from engine.config.refusal import RefusedError
from engine.metering.meter import Meter
from engine.model.moe.moe_layer import Experts
from engine.model.stage import Stage
from engine.parallel.collectives import Axis
from engine.parallel.parameters import ParameterFactory
from tests.unit.engine.checkpoint.tiny_models import LENGTH, MODELS, VOCAB, saved_model

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'train-cockpit[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed")

STEP = "checkpoints/step-0"


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(1))


def ours(folder: Path) -> Stage:
    """The engine's model with the weights of the checkpoint in `folder`, loaded in this process."""
    checkpoint = read(folder)
    model = checkpoint.manifest.layout.model
    meter = Meter(model.prediction_layers.stop, model.moe.experts if model.moe else 0)
    factory = ParameterFactory(0, Axis("tp", None, meter), Axis("ep", None, meter))
    stage = Stage(factory, model, range(model.layers), KnobValues.of(checkpoint.manifest.layout), meter)
    index = read_index(folder, checkpoint.manifest.files)
    stacked = {
        f"{prefix}.{name}"
        for prefix, module in stage.named_modules()
        if isinstance(module, Experts)
        for name, _ in module.named_parameters()
    }
    unread = set(index)
    with torch.no_grad():
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            parts = [f"model.{name}"]
            if name in stacked:
                parts = [f"model.{name}.{expert}" for expert in range(len(tensor))]
            elif name.endswith("rope"):
                continue
            whole = [read_tensor(folder, index, part) for part in parts]
            tensor.copy_(torch.stack(whole) if name in stacked else whole[0])
            unread -= set(parts)
    assert not unread
    return stage


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_text_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = saved_model(name, tmp_path / "hf")
    done = import_folder(tmp_path / "hf", tmp_path / "run", [])
    assert damage(tmp_path / "run" / STEP) is None and not done.left_out
    # in transformers, a bias on expert selection is a buffer
    assert done.parameters >= sum(p.numel() for p in theirs.parameters())
    stage = ours(tmp_path / "run" / STEP)
    with torch.no_grad():
        wanted = theirs(tokens()).logits
        logits = stage(tokens())
        assert wanted.std() > 0.3
        torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=2e-5)

    # After export: the same tensors, and the same text, token by token.
    out = export_checkpoint(tmp_path / "run", tmp_path / "back", "fp32", shard_bytes=40_000)
    assert out.files > 3
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    assert type(again) is type(theirs) or (name, out.architecture) == ("mistral", "LlamaForCausalLM")
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    prompt = tokens()[:, :6]
    text = again.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(text, theirs.generate(prompt, max_new_tokens=12, do_sample=False))
    assert torch.equal(text, greedy(stage, prompt, 12))


def greedy(stage: Stage, prompt: Tensor, count: int) -> Tensor:
    """The text that the engine's model generates with greedy decoding. Each forward pass computes a whole sequence of
    LENGTH tokens; the padding after the text has no effect on the text."""
    text = prompt
    for _ in range(count):
        padded = torch.nn.functional.pad(text, (0, LENGTH - text.shape[1]))
        with torch.no_grad():
            best = stage(padded)[:, text.shape[1] - 1].argmax(-1, keepdim=True)
        text = torch.cat((text, best), 1)
    return text


def test_dtypes(tmp_path: Path) -> None:
    """Weights that are imported in bf16 have the same values in a bf16 export and in an fp32 export."""
    from safetensors.torch import load_file, save_file

    saved_model("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    halved = {key: tensor.bfloat16() for key, tensor in load_file(path).items()}
    save_file(halved, path, metadata={"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "run", [])
    export_checkpoint(tmp_path / "run" / STEP, tmp_path / "bf16", "bf16")
    export_checkpoint(tmp_path / "run" / STEP, tmp_path / "fp32", "fp32")
    back = load_file(tmp_path / "bf16" / "model.safetensors")
    assert back.keys() == halved.keys()
    assert all(torch.equal(back[key], halved[key]) for key in halved)
    wide = load_file(tmp_path / "fp32" / "model.safetensors")
    assert all(torch.equal(wide[key], halved[key].float()) for key in halved)


def test_weights_that_a_dtype_cannot_represent_are_not_exported(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_model("llama", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, path, metadata={"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "run", [])
    with pytest.raises(
        RefusedError, match=r"model.norm.weight has a weight that is not finite in torch.float16"
    ):
        export_checkpoint(tmp_path / "run", tmp_path / "back", "fp16")
    assert not (tmp_path / "back").exists()


Json = dict[str, Any]
HOSTILE: dict[str, tuple[str, Json, str]] = {  # name -> (model, changes of config.json, refusal)
    "unknown": ("llama", {"model_type": "gpt2"}, "model_type = 'gpt2' is not an architecture that the engine trains"),
    "no type": ("llama", {"model_type": ["llama"]}, "model_type = ['llama'] is not an architecture"),
    "rope scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        "rope scaling 'llama3' is not supported; legal: none",
    ),
    "old rope scaling": (
        "llama",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope scaling 'yarn' is not supported",
    ),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; legal: 'silu'"),
    "biases": ("llama", {"attention_bias": True}, "attention_bias = true is not supported; legal: false"),
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4} is not supported"),
    "huge": ("llama", {"num_hidden_layers": 10**9}, "does not describe a model: "),
    "text for a number": ("llama", {"hidden_size": "32; rm"}, "does not describe a model: "),
    "no heads": ("llama", {"num_attention_heads": 0}, "does not describe a model: "),
    "another shape": ("llama", {"intermediate_size": 52}, "has the shape [48, 32], but config.json implies [52, 32]"),
    "another layer": ("llama", {"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight"),
    "window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
        | {"max_window_layers": 2, "x": "model.seq_len=16"},
        "model.seq_len = 16 is longer than model.max_seq_len = 8, the sliding window of some",
    ),
    "one expert": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = false is not supported; legal: true"),
    "irregular": ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 5}, "put experts into "
    "irregularly spaced layers"),
    "groups": ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    "no limit": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": None, "max_window_layers": 1}
        | {"x": "model.max_seq_len=none"},
        "model.max_seq_len = None is not the sliding window",
    ),
    "windows": ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention without"),
    "other layers": ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types = ['linear_attention', "),
    "both directions": ("llama", {"is_causal": False}, "is_causal = false is not supported; legal: true"),
    "layers of their own": ("llama", {"per_layer_config": {"1": {}}}, "per_layer_config = {'1': {}} is not supported"),
    "dropout": ("qwen2", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported; legal: 0.0"),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not supported; legal: 0.0"),
    "frequencies": ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "frequencies of its own"),
    "null": ("deepseek_v3", {"topk_group": None}, "topk_group = null is not legal; legal: a value, or no topk_group"),
    "no width": ("llama", {"intermediate_size": None}, "intermediate_size = null is not legal"),
    "two names": ("mixtral", {"num_experts": 7}, "num_experts = 7 and num_local_experts = 6 are names of one value"),
    "head": ("deepseek_v3", {"head_dim": 16}, "head_dim = 16 is not supported; legal: qk_rope_head_dim, or none"),
    "softmax": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
    "huge number": ("llama", {"rope_theta": 10**400}, "is not a legal number"),
    "huge count": ("llama", {"hidden_size": 10**30}, "a number of 31 digits is not legal"),
    "infinite": ("llama", {"rms_norm_eps": float("inf")}, "'Infinity' is not a legal number"),
    "not a number": ("llama", {"rope_theta": float("nan")}, "'NaN' is not a legal number"),
    "surrogate": ("llama", {"note": "\ud800"}, "config.json is not JSON"),
    "long list": ("qwen3_moe", {"mlp_only_layers": [[]]}, "mlp_only_layers = [[]] is not a list of whole numbers"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Saves the model of a name once, and returns its folder."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / "hf"
        saved_model(name, path)
        return path

    return folder


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_what_it_would_compute_in_another_way(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    name, changes, says = HOSTILE[case]
    shutil.copytree(saved(name), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    overrides = [changes.pop("x")] if "x" in (changes := dict(changes)) else []
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(tmp_path, says, overrides)


def refused(folder: Path, says: str, overrides: list[str] | None = None) -> None:
    with pytest.raises(RefusedError) as caught:
        import_folder(folder / "hf", folder / "run", overrides or [])
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "run").exists()


def test_refuses_hostile_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_model("llama", tmp_path / "hf")
    model, index = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "model.safetensors.index.json"
    good = load_file(model)
    part = model.rename(tmp_path / "hf" / "model-00001.safetensors")
    places = dict.fromkeys(good, part.name)
    for weight_map, says in (
        (
            places | {"lm_head.weight": "../secret.safetensors"},
            "names the file '../secret.safetensors'; legal: a file",
        ),
        (places | {"lm_head.weight": "/etc/passwd"}, "names the file '/etc/passwd'"),
        (places | {"lm_head.weight": "a\0.safetensors"}, "names the file"),
        (places | {"lm_head.weight": "other.safetensors"}, "cannot read"),
        (places | {"more": part.name}, "lacks the tensor 'more'"),
        (
            {key: file for key, file in places.items() if key != "lm_head.weight"},
            "has the tensor 'lm_head.weight', which model.safetensors.index.json does not list there",
        ),
        ({"lm_head.weight": 3}, "is not a safetensors index"),
        ([], "is not a safetensors index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, says)
    index.write_text("[" * 100_000)
    refused(tmp_path, "is not a safetensors index")
    part.rename(model)  # beside a single file, transformers does not read the index
    import_folder(tmp_path / "hf", tmp_path / "single", [])
    index.unlink()
    save_file(good | {"model.layers.1.extra": torch.zeros(2)}, model)
    refused(tmp_path, "has the tensor 'model.layers.1.extra', which the model of config.json does not have")
    save_file(good | {"lm_head.weight": torch.zeros(VOCAB, 32, dtype=torch.int64)}, model)
    refused(tmp_path, "lm_head.weight has the dtype I64; legal: F64, F32, BF16, F16")
    for content in (b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0nonsense", (2**40).to_bytes(8, "little") + b"{}"):
        model.write_bytes(content)
        refused(tmp_path, "is not a safetensors file")
    for bad in (float("nan"), float("-inf")):
        weights = good["model.layers.1.mlp.up_proj.weight"].clone()
        weights[3, 5] = bad
        save_file(good | {"model.layers.1.mlp.up_proj.weight": weights}, model)
        refused(tmp_path, "model.layers.1.mlp.up_proj.weight has NaN or infinite weights; legal: finite ones")
    model.unlink()
    refused(tmp_path, "has no safetensors")
    (tmp_path / "hf" / "config.json").write_text("{")
    refused(tmp_path, "config.json is not JSON")
    (tmp_path / "hf" / "config.json").unlink()
    refused(tmp_path, "config.json: No such file or directory")


def with_prediction(folder: Path) -> Any:
    """Save a randomly initialised DeepSeek-V3 with a multi-token prediction module, under the tensor names of
    DeepSeek's release. Returns the transformers model, which lacks the multi-token prediction module."""
    from safetensors.torch import load_file, save_file

    model, path = saved_model("deepseek_v3", folder, num_nextn_predict_layers=1), folder / "model.safetensors"
    tensors, coin = load_file(path), torch.Generator().manual_seed(2)

    def random(*shape: int) -> Tensor:
        return 0.2 * torch.randn(shape, generator=coin)

    last, new = "model.layers.2.", "model.layers.3."
    more = {key.replace(last, new): random(*t.shape) for key, t in tensors.items() if key.startswith(last)}
    more |= {f"{new}{norm}.weight": 1 + random(32) for norm in ("enorm", "hnorm", "shared_head.norm")}
    more |= {key: 1 + tensor for key, tensor in more.items() if key.endswith("layernorm.weight")}
    more[f"{new}eh_proj.weight"] = random(32, 64)
    more[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    more[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | more, path, metadata={"format": "pt"})
    return model


def test_multi_token_prediction_is_imported_on_request(tmp_path: Path) -> None:
    """The logits of the multi-token prediction module equal those computed with transformers' decoder layer, and an
    export has the same tensors as the imported model."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

    theirs, new = with_prediction(tmp_path / "hf"), "model.layers.3."
    assert f"{new}eh_proj.weight" in import_folder(tmp_path / "hf", tmp_path / "without", []).left_out
    assert not import_folder(tmp_path / "hf", tmp_path / "run", ["model.mtp_layers=1"]).left_out
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    layer = DeepseekV3DecoderLayer(theirs.config, 3)
    stacked = {
        "mlp.experts.gate_up_proj": torch.stack(
            [
                torch.cat([weights[f"{new}mlp.experts.{e}.{part}_proj.weight"] for part in ("gate", "up")])
                for e in range(8)
            ]
        ),
        "mlp.experts.down_proj": torch.stack(
            [weights[f"{new}mlp.experts.{e}.down_proj.weight"] for e in range(8)]
        ),
    }
    own = {key.removeprefix(new): tensor for key, tensor in weights.items() if key.startswith(new)}
    layer.load_state_dict({key: own[key] if key in own else stacked[key] for key in layer.state_dict()})
    states: list[Tensor] = []
    theirs.model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))

    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[f"{new}{name}.weight"]

    text = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    stage = ours(tmp_path / "run" / STEP)
    with torch.no_grad():
        main = theirs(text[:, :-1]).logits
        embedded = weights["model.embed_tokens.weight"][text[:, 1:]]
        joined = torch.cat((norm(embedded, "enorm"), norm(states[0], "hnorm")), -1)
        out = layer(
            joined @ weights[f"{new}eh_proj.weight"].T,
            attention_mask=torch.full((LENGTH, LENGTH), -torch.inf).triu(1).expand(2, 1, -1, -1),
            position_embeddings=theirs.model.rotary_emb(joined, torch.arange(LENGTH).unsqueeze(0)),
        )
        further = norm(out, "shared_head.norm") @ weights["lm_head.weight"].T
        targets = torch.stack((text[:, 1:], text[:, 1:].roll(-1, 1)), 1)
        logits = stage(text[:, :-1], None, targets)
    torch.testing.assert_close(logits, torch.cat((main, further)), rtol=1e-4, atol=2e-5)

    assert export_checkpoint(tmp_path / "run", tmp_path / "back", "fp32").mtp_layers == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys() and all(torch.equal(back[key], weights[key]) for key in back)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    greedy_text = again.generate(text[:, :6], max_new_tokens=12, do_sample=False)
    assert torch.equal(greedy_text, theirs.generate(text[:, :6], max_new_tokens=12, do_sample=False))


def test_refuses_multi_token_prediction_with_a_head_of_its_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with_prediction(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    refused(
        tmp_path, "shared_head.head.weight differs from lm_head.weight; legal: equal", ["model.mtp_layers=1"]
    )


def test_a_bias_of_zero_is_exported_and_an_export_replaces_nothing(tmp_path: Path) -> None:
    """A bias on expert selection that is still 0 for all experts does not prevent an export. An export is refused if
    its folder already exists, or if there is no complete checkpoint to export."""
    saved_model("mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", ["model.moe.balance=bias"])
    export_checkpoint(tmp_path / "run", tmp_path / "zero", "fp32")  # all biases are 0
    with pytest.raises(RefusedError, match="already exists"):
        export_checkpoint(tmp_path / "run", tmp_path / "zero", "fp32")
    with pytest.raises(
        RefusedError, match=r"there is no complete checkpoint in .*; legal: a checkpoint, or the folder"
    ):
        export_checkpoint(tmp_path / "hf", tmp_path / "out", "fp32")
