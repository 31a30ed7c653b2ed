"""`engine sample`: generates text with a checkpoint."""

import argparse
import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.rundir.runs import RunError
from engine.cli.usage import refuse, refuse_options
from engine.config.layout import Layout
from engine.config.refusal import shown

if TYPE_CHECKING:
    from engine.data.tokenizers import Tokenizer
    from engine.sampling.generation import Generated

ABOUT = "generate text with a checkpoint"
EPILOG = (
    "The checkpoint may have been trained in any layout. grid.tp, grid.pp and grid.ep set the number of "
    "ranks that generate, one by default; like engine run, the command also runs under torchrun and Slurm. "
    "See docs/train/sampling.md."
)
TOKENS = 100  # tokens to generate, unless fewer fit


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("sample", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a checkpoint, or the folder of a run: its newest checkpoint"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="such as grid.tp=2")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--prompt-ids", metavar="ID,ID,...", help="the prompt as token ids; the output is token ids too"
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help=f"tokens to generate (default: {TOKENS}, or as many as fit)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="divides the logits; 0: greedy (default: 1)",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="choose among the fewest tokens whose probabilities sum to P"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="seed of the random choices (default: 0)"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="bytes|FILE",
        help="bytes, or a tokenizer.json (default: bytes, if the model was trained on bytes)",
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto (default): one GPU per rank if this machine has enough GPUs, else the CPU",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("sample", rest)
    if options.source is None or ("=" in str(options.source) and not options.source.exists()):
        refuse("engine sample needs a checkpoint or the folder of a run as first argument")
    refuse_settings(options)
    if importlib.util.find_spec("torch") is None:
        refuse("engine sample needs torch; pip install torch, then 'train-cockpit[engine]'")
    from engine.checkpoint.reading import newest_checkpoint
    from engine.launch.sample import run_sample
    from engine.sampling.report import Report
    from engine.sampling.request import Request
    from engine.sampling.settings import Choice, sampling_layout
    from engine.sampling.text import TextStream

    checkpoint = newest_checkpoint(options.source)
    layout = sampling_layout(checkpoint.manifest.layout, options.overrides + rest)
    tokenizer = None if options.prompt_ids else tokenizer_for(checkpoint.manifest.layout, options.tokenizer)
    prompt = read_ids(options.prompt_ids) if tokenizer is None else encoded(options.prompt, tokenizer)
    count = token_count(prompt, options.tokens, layout)
    choice = Choice(options.temperature, options.top_k, options.top_p, options.seed)
    end = tokenizer.end_of_document if tokenizer else None
    request = Request(layout, checkpoint, prompt, count, choice, end)
    stream = TextStream(tokenizer) if tokenizer else None

    def write(text: str) -> None:
        if not options.json:
            sys.stdout.write(text)
            sys.stdout.flush()

    def on_tokens(row: list[int]) -> None:
        if row[0] != end:
            write(stream.add(row[0]) if stream else f"{row[0]} ")

    def on_generated(done: "Generated", found: int, formula: int) -> None:
        ids, report = done.tokens[0], Report(done, found, formula)
        if options.json:
            row = report.facts | {"checkpoint": str(checkpoint.folder), "tokens": ids}
            if tokenizer:
                kept = ids[:-1] if ids[-1] == end else ids
                row["text"] = tokenizer.decode(kept).decode("utf-8", "backslashreplace")
            sys.stdout.write(f"{json.dumps(row)}\n")
            return
        write(f"{stream.end() if stream else ''}\n")
        sys.stderr.write(f"{report}\n")

    try:
        status = run_sample(request, options.device, on_tokens, on_generated)
    except RunError as error:
        refuse(str(error))
    raise SystemExit(status)


def refuse_settings(options: argparse.Namespace) -> None:
    """Refuse options with invalid values."""
    if (options.prompt is None) == (options.prompt_ids is None):
        refuse("engine sample needs one of --prompt TEXT and --prompt-ids ID,ID,...")
    bounds = (
        ("--tokens", options.tokens, 1, 2**30),
        ("--temperature", options.temperature, 0, 1000),
        ("--top-k", options.top_k, 1, 2**30),
        ("--seed", options.seed, 0, 2**53),
    )
    for name, value, low, high in bounds:
        if value is not None and not low <= value <= high:
            refuse(f"{name} = {shown(value)} is not legal; legal: from {low} to {high}")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        refuse(f"--top-p = {options.top_p} is not legal; legal: above 0, at most 1")
    if 0 < options.temperature < math.ulp(1.0):
        refuse(
            f"--temperature = {options.temperature} is not legal; legal: 0 (greedy), or above {math.ulp(1.0)}"
        )


def tokenizer_for(saved: Layout, given: str | None) -> "Tokenizer":
    """The tokenizer that the user named, or bytes if the model was trained on bytes."""
    from engine.data.shards import DataError, read_index
    from engine.data.tokenizers import tokenizer_of

    trained = "bytes"
    if saved.data.source == "shards":
        try:
            trained = read_index(Path((saved.data.shards or ("",))[0]))[0].tokenizer
        except DataError as error:
            if given is None:
                refuse(f"{error}; or name the tokenizer: --tokenizer FILE")
            trained = given
    elif saved.model.vocab > 256 and given is None:
        refuse(
            f"the model has a vocabulary of {saved.model.vocab:,} tokens, and its layout names no "
            f"tokenizer; legal: --tokenizer with a "
            "tokenizer.json or bytes, or --prompt-ids"
        )
    if given is None and trained != "bytes":
        refuse(
            f"the model was trained on tokens of {trained}; legal: --tokenizer with that file, or --prompt-ids"
        )
    return tokenizer_of(given or "bytes", None)


def encoded(prompt: str, tokenizer: "Tokenizer") -> list[int]:
    ids = [int(token) for token in tokenizer.encode([os.fsencode(prompt)])[0]]
    if not ids:
        refuse("--prompt is empty; legal: a text of at least one token")
    return ids


def read_ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdecimal() for part in parts):
        refuse(f"--prompt-ids = {shown(text)} is not legal; legal: token ids such as 12,7,44")
    if any(len(part.strip()) > 18 for part in parts):
        refuse(f"--prompt-ids = {shown(text)} has a token outside every vocabulary")
    return [int(part) for part in parts]


def token_count(prompt: list[int], asked: int | None, layout: Layout) -> int:
    """The number of tokens to generate. Refuses a prompt that is too long for the model or contains a token outside the
    vocabulary."""
    vocab, most = layout.model.vocab, layout.model.seq_len - len(prompt)
    if max(prompt) >= vocab:
        refuse(f"the prompt has the token {max(prompt)}; legal: below model.vocab = {vocab}")
    if most < 1:
        refuse(
            f"the prompt has {len(prompt)} tokens, and model.seq_len = {layout.model.seq_len}; legal: a prompt of at "
            f"most {layout.model.seq_len - 1} tokens"
        )
    if asked is not None and asked > most:
        refuse(
            f"--tokens = {asked} after a prompt of {len(prompt)} is more than model.seq_len = {layout.model.seq_len}; "
            f"legal: at most {most}"
        )
    return min(TOKENS, most) if asked is None else asked
