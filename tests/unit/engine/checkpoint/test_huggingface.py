"""Import and export of Hugging Face models: logits and generated text equal those of transformers."""

import json
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
    """The model of a checkpoint in this process."""
    checkpoint = read(folder)
    model = checkpoint.manifest.layout.model
    meter = Meter(model.layers, model.moe.experts if model.moe else 0)
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
    """Greedy text of the engine's model. This function computes whole sequences of LENGTH tokens; later tokens have no
    effect on earlier ones."""
    text = prompt
    for _ in range(count):
        padded = torch.nn.functional.pad(text, (0, LENGTH - text.shape[1]))
        with torch.no_grad():
            best = stage(padded)[:, text.shape[1] - 1].argmax(-1, keepdim=True)
        text = torch.cat((text, best), 1)
    return text


def test_dtypes(tmp_path: Path) -> None:
    """Weights in bf16 stay as they are until a run casts them; an export in bf16 is half as large as one in fp32."""
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
    "quantized": ("llama", {"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
    "huge": ("llama", {"num_hidden_layers": 10**9}, "does not describe a model: "),
    "text for a number": ("llama", {"hidden_size": "32; rm"}, "does not describe a model: "),
    "no heads": ("llama", {"num_attention_heads": 0}, "does not describe a model: "),
    "another shape": ("llama", {"intermediate_size": 52}, "has the shape [48, 32], but config.json implies [52, 32]"),
    "another layer": ("llama", {"num_hidden_layers": 4}, "lacks the tensor model.layers.3.input_layernorm.weight"),
    "window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 8, "x": "model.seq_len=16"},
        "model.seq_len = 16 is longer than the sliding window",
    ),
    "one expert": ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok = 1 is not supported"),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob = false is not supported; legal: true"),
    "irregular": ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 5}, "put experts into "
    "irregularly spaced layers"),
    "groups": ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 1}, "num_experts_per_tok = 1"),
    "norm": ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps = 1e-05 is not supported; legal: 1e-06"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_what_it_would_compute_in_another_way(case: str, tmp_path: Path) -> None:
    name, changes, says = HOSTILE[case]
    saved_model(name, tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    overrides = [changes.pop("x")] if "x" in (changes := dict(changes)) else []
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(tmp_path, says, overrides)


def refused(folder: Path, says: str, overrides: list[str] | None = None) -> None:
    with pytest.raises(RefusedError) as caught:
        import_folder(folder / "hf", folder / "run", overrides or [])
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert not (folder / "run" / "checkpoints").exists()


def test_refuses_hostile_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_model("llama", tmp_path / "hf")
    model, index = tmp_path / "hf" / "model.safetensors", tmp_path / "hf" / "model.safetensors.index.json"
    good = load_file(model)
    places = dict.fromkeys(good, "model.safetensors")
    for weight_map, says in (
        (
            places | {"lm_head.weight": "../secret.safetensors"},
            "names the file '../secret.safetensors'; legal: a file",
        ),
        (places | {"lm_head.weight": "/etc/passwd"}, "names the file '/etc/passwd'"),
        (places | {"lm_head.weight": "a\0.safetensors"}, "names the file"),
        (places | {"lm_head.weight": "other.safetensors"}, "cannot read"),
        (places | {"more": "model.safetensors"}, "lacks the tensor 'more'"),
        (
            {key: file for key, file in places.items() if key != "lm_head.weight"},
            "lacks the tensor lm_head.weight",
        ),
        ({"lm_head.weight": 3}, "is not a safetensors index"),
        ([], "is not a safetensors index"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(tmp_path, says)
    index.write_text("[" * 100_000)
    refused(tmp_path, "is not a safetensors index")
    index.unlink()
    save_file(good | {"model.layers.1.extra": torch.zeros(2)}, model)
    refused(tmp_path, "has the tensor 'model.layers.1.extra', which the model of config.json does not have")
    save_file(good | {"lm_head.weight": torch.zeros(VOCAB, 32, dtype=torch.int64)}, model)
    refused(tmp_path, "lm_head.weight has the dtype I64; legal: F64, F32, BF16, F16")
    for content in (b"", b"\xff" * 64, b"\x08\0\0\0\0\0\0\0nonsense", (2**40).to_bytes(8, "little") + b"{}"):
        model.write_bytes(content)
        refused(tmp_path, "is not a safetensors file")
    model.unlink()
    refused(tmp_path, "has no safetensors")
    (tmp_path / "hf" / "config.json").write_text("{")
    refused(tmp_path, "config.json is not JSON")
    (tmp_path / "hf" / "config.json").unlink()
    refused(tmp_path, "config.json: No such file or directory")


def test_layers_of_multi_token_prediction_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved_model("deepseek_v3", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.zeros(2)}, path)
    assert import_folder(tmp_path / "hf", tmp_path / "run", []).left_out == ["model.layers.3.eh_proj.weight"]


def test_refuses_to_export_what_no_architecture_has(tmp_path: Path) -> None:
    """Refused: a trained bias on expert selection, and a model that combines parts that no single architecture has."""
    saved_model("mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run", ["model.moe.balance=bias"])
    export_checkpoint(tmp_path / "run", tmp_path / "zero", "fp32")  # all biases are 0
    with pytest.raises(RefusedError, match="already exists"):
        export_checkpoint(tmp_path / "run", tmp_path / "zero", "fp32")
    with pytest.raises(
        RefusedError, match=r"there is no complete checkpoint in .*; legal: a checkpoint, or the folder"
    ):
        export_checkpoint(tmp_path / "hf", tmp_path / "out", "fp32")
