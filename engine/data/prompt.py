"""The prompt in a layout's section [sample] as token ids, and the tokenizer that decodes generated tokens.
Torch-free."""

from dataclasses import dataclass
from pathlib import Path

from engine.config.layout import Layout
from engine.config.refusal import LayoutError, shown
from engine.data.shards import read_index
from engine.data.tokenizers import Bytes, HuggingFace, Tokenizer

TOKENS = 100  # tokens to generate, unless the layout gives a number or fewer fit


@dataclass(frozen=True)
class Prompt:
    """The token ids of the prompt, and the maximum number of tokens to generate after the prompt. `shown`: whether the
    prompt is part of the displayed text; False if the layout has no prompt and generation starts with the token that
    separates documents."""

    ids: list[int]
    tokens: int
    tokenizer: Tokenizer
    shown: bool


def sample_prompt(layout: Layout) -> Prompt | None:
    """The prompt from the layout's section [sample]; None if the run generates no text. Raises RefusedError."""
    wanted, model = layout.sample, layout.model
    if not wanted.every:
        return None
    tokenizer = _tokenizer(layout)
    ids = [tokenizer.end_of_document]  # the end of a document is the beginning of the next one
    if wanted.prompt is not None:
        ids = [
            int(token) for token in tokenizer.encode([wanted.prompt.encode("utf-8", "surrogateescape")])[0]
        ]
    most = model.seq_len - len(ids)
    if not ids:
        raise LayoutError(f"sample.prompt = {shown(wanted.prompt)} has no token; legal: at least one")
    if max(ids) >= model.vocab:
        raise LayoutError(
            f"sample.prompt has the token {max(ids)}, but model.vocab = {model.vocab}; legal: tokens below that"
        )
    if most < 1:
        raise LayoutError(
            f"sample.prompt has {len(ids)} tokens, and model.seq_len = {model.seq_len}; legal: a prompt of at most "
            f"{model.seq_len - 1} tokens"
        )
    if wanted.tokens is not None and wanted.tokens > most:
        raise LayoutError(
            f"sample.tokens = {wanted.tokens} after a prompt of {len(ids)} is more than model.seq_len = "
            f"{model.seq_len}; legal: at most {most}"
        )
    count = min(TOKENS, most) if wanted.tokens is None else wanted.tokens
    return Prompt(ids, count, tokenizer, wanted.prompt is not None)


def _tokenizer(layout: Layout) -> Tokenizer:
    """The tokenizer with which the training text was converted to tokens."""
    given = layout.sample.tokenizer
    index = read_index(Path((layout.data.shards or ("",))[0]))[0] if layout.data.source == "shards" else None
    if index is None or index.tokenizer == "bytes":
        if given is not None:
            raise LayoutError(f"sample.tokenizer = {given}, but the model is trained on bytes; legal: none")
        return Bytes()
    if given is None:
        raise LayoutError(
            f"sample.every = {layout.sample.every} needs sample.tokenizer, because the token shards were written with "
            f"{index.tokenizer}; legal: the path of that file"
        )
    tokenizer = HuggingFace(Path(given), index.end_of_document)
    if tokenizer.name.rpartition(" ")[2] != index.tokenizer.rpartition(" ")[2]:
        raise LayoutError(
            f"sample.tokenizer = {given} is {tokenizer.name}, but the token shards were written with "
            f"{index.tokenizer}; legal: the path of that file"
        )
    return tokenizer
