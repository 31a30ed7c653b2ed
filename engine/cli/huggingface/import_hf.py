"""`engine import-hf`: converts a model in Hugging Face format to a checkpoint."""

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

from engine.checkpoint.huggingface.architectures import kinds
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options

ABOUT = "convert a Hugging Face model to a checkpoint, to train it in any layout"
EPILOG = f"Architectures: {', '.join(kinds())}. docs/train/huggingface.md lists what is not supported."


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("import-hf", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument("source", nargs="?", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument(
        "target", nargs="?", type=Path, help="a new folder for layout.toml and the checkpoint"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="keys of the new layout, such as model.seq_len=2048",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("import-hf", rest)
    need_packages("import-hf")
    if options.source is None or options.target is None or "=" in str(options.target):
        refuse(
            "engine import-hf needs two folders: one with a Hugging Face model, and a new one for the checkpoint"
        )
    from engine.checkpoint.huggingface.importing import import_folder

    done = import_folder(options.source, options.target, options.overrides + rest)
    if options.json:
        row: dict[str, Any] = {
            "folder": str(done.folder),
            "architecture": done.architecture,
            "tensors": done.tensors,
        }
        row |= {"parameters": done.parameters, "bytes": done.bytes, "left_out": done.left_out}
        row["untied"] = done.untied
        print_text(f"{json.dumps(row)}\n")
        return
    left_out = f"; left out {len(done.left_out)}, the first {done.left_out[0]}" if done.left_out else ""
    if done.untied:
        print_text("tie_word_embeddings = true, but lm_head.weight has other weights: imported as not tied\n")
    print_text(
        f"{done.architecture}: {done.parameters:,} parameters in {done.tensors:,} tensors, "
        f"{done.bytes / 2**20:,.1f} MiB{left_out}\n"
        f"engine run {done.folder}/layout.toml --resume {done.folder} trains it\n"
    )


def need_packages(command: str) -> None:
    for package, extra in (("torch", "engine"), ("safetensors", "hf")):
        if importlib.util.find_spec(package) is None:
            refuse(f"engine {command} needs {package}; pip install 'train-cockpit[{extra}]'")
