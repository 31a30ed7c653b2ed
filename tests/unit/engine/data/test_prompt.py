"""The [sample] table of a layout: the tokens of the prompt, and one-sentence error messages."""

import json
from pathlib import Path

import numpy as np
import pytest

from engine.config.refusal import RefusedError
from engine.config.toml import load
from engine.data.prompt import Prompt, sample_prompt
from engine.data.tokenizers import Bytes
from engine.data.writing import ShardWriter

DEMO = Path(__file__).parents[4] / "layouts/demo.toml"
EVERY = "sample.every=5"


def prompt(*overrides: str) -> Prompt | None:
    return sample_prompt(load(DEMO, [EVERY, *overrides]))


def test_prompts_of_a_model_that_is_trained_on_bytes() -> None:
    assert prompt("sample.every=0", "sample.tokens=9999") is None
    assert prompt('sample.prompt="a\\né"', "sample.tokens=9") == Prompt([97, 10, 195, 169], 9, Bytes(), True)
    # Without a prompt, the model continues after the zero byte that ends a document; as many tokens as fit.
    assert prompt() == Prompt([0], 63, Bytes(), False)
    assert prompt("model.seq_len=256") == Prompt([0], 100, Bytes(), False)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["sample.tokens=64"], "is more than model.seq_len = 64; legal: at most 63"),
        ([f"sample.prompt={'x' * 64}"], "has 64 tokens, and model.seq_len = 64; legal: a prompt of at most 63"),
        (["sample.prompt="], "sample.prompt = '' is not legal; legal: 1 to 4,096 characters of text, without NUL"),
        (["sample.tokenizer=a.json"], "sample.tokenizer = a.json, but the model is trained on bytes; legal: none"),
        (["model.moe.router=expert_choice", "model.moe.balance=none"], "needs a model that generates token by token"),
        (["model.implementation=my.models:Own"], "legal for sample.every = 5: transformer"),
        (["sample.temperature=1e-300"], "sample.temperature = 1e-300 is not legal; legal: 0 (greedy), or above"),
    ],
)  # fmt: skip
def test_refusals(overrides: list[str], sentence: str) -> None:
    with pytest.raises(RefusedError) as error:
        prompt(*overrides)
    assert sentence in str(error.value)


def test_token_shards_need_their_tokenizer(tmp_path: Path) -> None:
    out = tmp_path / "shards"
    with ShardWriter(out, 256, 3, "words.json blake2b-0011223344556677", shard_tokens=1000) as writer:
        writer.begin_document()
        writer.add(np.arange(200, dtype=np.uint8))
        writer.end_document()
    overrides = ["data.source=shards", f"data.shards={json.dumps([str(out)])}"]
    with pytest.raises(
        RefusedError, match=r"sample.every = 5 needs sample.tokenizer, .* were written with words.json"
    ):
        prompt(*overrides)
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "words.json"
    library.Tokenizer(library.models.WordLevel({"a": 0, "b": 1}, "a")).save(str(path))
    with pytest.raises(
        RefusedError, match=r"words.json blake2b-.*, but the token shards were written with words.json"
    ):
        prompt(*overrides, f"sample.tokenizer={path}")
