"""Token shards: what is written is read back, and damaged files are refused with a one-sentence error message."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config.layout import Layout
from engine.config.toml import load
from engine.data.documents import documents
from engine.data.mixture import read_shards
from engine.data.shards import DataError, Source
from engine.data.writing import PARTIAL, ShardWriter

DEMO = Path(__file__).parents[4] / "layouts/demo.toml"
TEXTS = [b"to be, or not to be", b"that is", b"the question" * 9]


def written(out: Path, texts: list[bytes] = TEXTS, vocab: int = 256) -> Path:
    with ShardWriter(out, vocab, 0, "bytes", shard_tokens=20) as writer:
        for text in texts:
            writer.begin_document()
            writer.add(np.frombuffer(text, np.uint8))
            writer.end_document()
    return out


def engine(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "engine", *arguments], capture_output=True, text=True)


def layout(*folders: Path, more: tuple[str, ...] = ()) -> Layout:
    names = json.dumps([str(folder) for folder in folders])
    return load(DEMO, ["data.source=shards", f"data.shards={names}", "model.seq_len=16", *more])


@pytest.mark.parametrize(("vocab", "dtype"), [(256, "uint8"), (50_257, "uint16"), (2**17, "uint32")])
def test_tokens_and_documents_across_shards(tmp_path: Path, vocab: int, dtype: str) -> None:
    source = Source(written(tmp_path / "out", vocab=vocab))
    assert source.index.dtype == dtype and len(source.index.shards) == 2 and source.damage() is None
    whole = b"".join(text + b"\0" for text in TEXTS)
    for first, count in ((0, len(whole)), (3, 5), (18, 12), (len(whole) - 1, 1)):
        tokens, numbers = source.read(first, count, documents=True)
        assert bytes(tokens.tolist()) == whole[first : first + count]
        assert numbers is not None
        expected = [1 + whole[:n].count(0) for n in range(first, first + count)]
        assert numbers.tolist() == expected


def test_a_sample_depends_on_its_number_only(tmp_path: Path) -> None:
    text = read_shards(layout(written(tmp_path / "a"), written(tmp_path / "b", [b"x" * 200])))
    windows = text.windows(16, 8, seed=5)
    whole = windows.batch(3, 0, 8).tokens
    assert np.array_equal(np.concatenate([windows.batch(3, n, 2).tokens for n in (0, 2, 4, 6)]), whole)
    assert np.array_equal(text.windows(16, 4, seed=5).batch(6, 0, 4).tokens, whole[:4])
    assert not np.array_equal(text.windows(16, 8, seed=6).batch(3, 0, 8).tokens, whole)


def test_a_document_in_parts_is_whole(tmp_path: Path) -> None:
    line = "é" * 99 + "\n"
    (tmp_path / "long.txt").write_text(line * 20_000)
    (tmp_path / "one-line.txt").write_text("é" * 3_000_000)
    for name in ("long.txt", "one-line.txt"):
        (document,) = ([*one] for one in documents(tmp_path / name, "text"))
        assert len(document) > 1 and b"".join(document) == (tmp_path / name).read_bytes()
        assert all(part.decode() for part in document), "no character is cut"


def test_the_command_line_with_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n\n{"body": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    out = str(tmp_path / "out")
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]
    done = engine("tokenize", *inputs, "--tokenizer", "bytes", "--field", "body", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "14 tokens of 3 documents in 1 shard, uint8, vocabulary 256, tokenizer bytes" in done.stdout
    assert bytes(Source(tmp_path / "out").read(0, 14)[0].tolist()) == b"one\0two\0three\0"
    assert engine("tokenize", "--check", out).returncode == 0
    assert not (tmp_path / f"out{PARTIAL}").exists()


HOSTILE: dict[str, tuple[list[str], str]] = {
    "no JSON": (["bad.jsonl"], "line 1 is not JSON"),
    "no field": (["array.jsonl"], "has no text in the field 'text'"),
    "no file": (["absent.txt"], "is not a file"),
    "a folder": (["."], "is not a file"),
    "empty": (["empty.txt"], "contain no document"),
    "no tokenizer": (["empty.txt", "--tokenizer", "bad.jsonl"], "bad.jsonl"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_input_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "array.jsonl").write_text('["text"]\n')
    (tmp_path / "empty.txt").write_text("")
    arguments, sentence = HOSTILE[name]
    inputs = [str(tmp_path / one) if "." in one else one for one in arguments]
    given = inputs if "--tokenizer" in inputs else [*inputs, "--tokenizer", "bytes"]
    done = engine("tokenize", *given, "--out", str(tmp_path / "out"))
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1, done.stderr
    assert sentence in done.stderr
    assert not [*tmp_path.glob("out*")], "nothing is left behind"


def test_an_existing_or_unfinished_folder_is_refused(tmp_path: Path) -> None:
    written(tmp_path / "out")
    with pytest.raises(DataError, match="out exists; legal: remove it"):
        written(tmp_path / "out")
    (tmp_path / f"other{PARTIAL}").mkdir()
    with pytest.raises(DataError, match="is the unfinished output of an engine tokenize"):
        written(tmp_path / "other")


def damaged(folder: Path, what: str) -> None:
    index = json.loads((folder / "index.json").read_text())
    match what:
        case "no index":
            (folder / "index.json").unlink()
        case "not an index":
            (folder / "index.json").write_text("{}")
        case "another format":
            (folder / "index.json").write_text(json.dumps(index | {"format": 99}))
        case "cut short":
            (folder / "00001.tokens").write_bytes(b"x")
        case "no documents":
            (folder / "00000.documents").unlink()
        case "small vocabulary":
            (folder / "index.json").write_text(json.dumps(index | {"vocab": 2}))


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no index", "has no readable index.json"),
        ("not an index", "is not an index of token shards"),
        ("another format", "has the format 99"),
        ("cut short", "out/00001.tokens has 1 of 117 bytes"),
        ("no documents", "is missing or not a file"),
    ],
)
def test_damaged_shards_are_refused(tmp_path: Path, what: str, sentence: str) -> None:
    damaged(folder := written(tmp_path / "out"), what)
    with pytest.raises(DataError, match=sentence):
        read_shards(layout(folder))


def test_a_flipped_bit_and_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    tokens = folder / "00001.tokens"
    tokens.write_bytes(tokens.read_bytes().replace(b"question", b"quEstion", 1))
    assert "shard 1 has changed" in str(Source(folder).damage())
    damaged(folder, "small vocabulary")
    with pytest.raises(DataError, match="has the token 1"):
        Source(folder).read(0, 9)


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("model.seq_len=512",), "too few for model.seq_len = 512"),
    (("data.epochs=1", "train.steps=50"), "go beyond the end of the data"),
    (("data.digest=blake2b-0123456789abcdef",), "but the folders of data.shards have"),
]


@pytest.mark.parametrize(("more", "sentence"), REFUSED)
def test_layouts_that_do_not_go_with_the_shards(tmp_path: Path, more: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        read_shards(layout(written(tmp_path / "out"), more=more))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["data.source=shards"], "needs data.shards"),
        (['data.shards=["a"]'], "data.shards is given, but data.source = 'stdlib'"),
        (["data.source=shards", 'data.shards=["a"]', "data.weights=[1.0, 2.0]"], "2 numbers for 1 folders"),
        (["data.source=shards", 'data.shards=["a"]', "data.weights=[0.0]"], "data.weights"),
        (["data.prefetch=65"], "data.prefetch = 65"),
        (["data.reset_positions=true"], "requires data.separate_documents = true"),
    ],
)
def test_illegal_keys(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load(DEMO, overrides)


def small_tokenizer(path: Path, end: str = "</s>") -> Path:
    """Write a tokenizer.json with a vocabulary of whole words, as the `tokenizers` library saves it."""
    library: Any = pytest.importorskip("tokenizers", reason="the extra `data` is not installed")
    words = {"<unk>": 0, end: 1, "to": 2, "be": 3, "or": 4, "not": 5}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    path = small_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_text('{"text": "to be or not </s> to be"}\n{"text": "be"}\n')
    done = engine(
        "tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", str(path), "--out", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    source = Source(tmp_path / "out")
    tokens = source.read(0, len(source))[0].tolist()
    assert tokens[:4] == [2, 3, 4, 5] and tokens[-5:] == [2, 3, 1, 3, 1]
    assert tokens.count(1) == 2, "a document cannot forge its end"
    other = small_tokenizer(tmp_path / "other.json", end="<stop>")
    refused = engine(
        "tokenize", str(tmp_path / "a.jsonl"), "--tokenizer", str(other), "--out", str(tmp_path / "o")
    )
    assert refused.returncode == 2 and "has no token <|endoftext|> or" in refused.stderr
