"""A Hugging Face model is imported, fine-tuned for two steps on several ranks, and exported; its weights then equal
those from a plain training loop with transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.config.toml import load
from engine.train.batches.corpus import read_corpus
from engine.train.batches.samples import Samples
from tests.unit.engine.checkpoint.tiny_models import saved_model

pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'train-cockpit[hf]'")
pytest.importorskip("transformers", reason="transformers is not installed")

ROOT = Path(__file__).parents[3]
STEPS = 2
FINE_TUNING = [
    *["train.optimizer=sgd", "train.lr=0.1", f"train.steps={STEPS}", f"checkpoint.every={STEPS}"],
    *["train.global_batch=8", "knobs.micro_batches=2", "knobs.aux_loss_coef=0.0", "knobs.bias_rate=0.0"],
]
LAYOUTS = {
    "deepseek_v3": ["grid.pp=2", "grid.tp=2", "grid.ep=2"],
    "llama tied": ["grid.dp_shard=2", "grid.tp=2", "train.zero=3"],
    "mixtral": ["grid.cp=2", "grid.tp=2", "grid.ep=2", "model.seq_len=16"],
    "qwen3_moe": [
        "knobs.micro_batches=4",
        "grid.pp=3",
        "grid.cp=2",
        "grid.cp_method=ulysses",
        "grid.ep=2",
        "model.seq_len=16",
    ],
    "qwen2": ["grid.dp_replicate=2", "grid.tp=2", "knobs.recompute=full"],
}
QUICK = "deepseek_v3"


def engine(*words: str | Path) -> str:
    command = [sys.executable, "-m", "engine", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", [name if name == QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_fine_tuning_equals_a_plain_loop(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = saved_model(name, tmp_path / "hf", bos_token_id=5, eos_token_id=[6, 7])
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    where = [word for word in LAYOUTS[name] if word.startswith("model.")]
    engine("import-hf", tmp_path / "hf", tmp_path / "start", *where)
    words = [
        tmp_path / "start" / "layout.toml",
        "--resume",
        tmp_path / "start",
        "--run-dir",
        tmp_path / "tuned",
    ]
    engine("run", *words, "--hub", "none", "--device", "cpu", *FINE_TUNING, *LAYOUTS[name])
    engine("export-hf", tmp_path / "tuned", tmp_path / "out")

    imported, exported = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("hf", "out"))
    assert exported == imported | {"torch_dtype": "float32"}

    layout = load(tmp_path / "start" / "layout.toml", [*FINE_TUNING, *where])
    train = layout.train
    samples = Samples(read_corpus(layout), layout.model.seq_len, train.global_batch, layout.run.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=train.lr)
    for step in range(STEPS):
        tokens, targets, _ = samples.batch(step, 0, train.global_batch)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for key, wanted in model.state_dict().items():
        update, ours = wanted - before[key], tuned[key] - before[key]
        if key.endswith("e_score_correction_bias"):
            assert torch.equal(tuned[key], wanted)
            continue
        assert update.norm() > 0, key
        # An update is the difference of two fp32 weights, so it includes their rounding.
        rounding = 2.0**-23 * wanted.norm()
        assert (ours - update).norm() < 1e-4 * update.norm() + rounding, key
