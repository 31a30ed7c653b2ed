"""`engine export-hf`: writes a checkpoint in Hugging Face format."""

import argparse
import json
from pathlib import Path
from typing import Any

from engine.checkpoint.huggingface.architectures import kinds
from engine.cli.huggingface.import_hf import need_packages
from engine.cli.printing import print_text
from engine.cli.usage import refuse, refuse_options

ABOUT = "write a checkpoint in Hugging Face format: config.json and safetensors"
EPILOG = (
    f"Architectures: {', '.join(kinds())}; the model determines which one is written. docs/train/huggingface.md "
    f"lists what is not supported."
)


def add_parser(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser("export-hf", help=ABOUT, description=ABOUT, epilog=EPILOG)
    parser.add_argument(
        "source", nargs="?", type=Path, help="a checkpoint, or the folder of a run: its newest checkpoint"
    )
    parser.add_argument("target", nargs="?", type=Path, help="a new folder")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        default="fp32",
        help="dtype of the written weights (default: fp32)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(options: argparse.Namespace, rest: list[str]) -> None:
    refuse_options("export-hf", rest)
    need_packages("export-hf")
    if options.source is None or options.target is None or rest:
        refuse("engine export-hf needs a checkpoint or a run, and a new folder")
    from engine.checkpoint.huggingface.exporting import export_checkpoint

    done = export_checkpoint(options.source, options.target, options.dtype)
    if options.json:
        row: dict[str, Any] = {
            "folder": str(done.folder),
            "checkpoint": str(done.checkpoint),
            "architecture": done.architecture,
        }
        row |= {"parameters": done.parameters, "bytes": done.bytes, "files": done.files}
        if done.mtp_layers:
            row["mtp_layers_left_out"] = done.mtp_layers
        print_text(f"{json.dumps(row)}\n")
        return
    print_text(
        f"{done.architecture}: {done.parameters:,} parameters of {done.checkpoint} in {done.folder}, "
        f"{done.bytes / 2**20:,.1f} MiB in {done.files} file{'s' if done.files > 1 else ''}\n"
    )
    if done.mtp_layers:
        print_text(
            f"left out: model.mtp_layers = {done.mtp_layers}, because {done.architecture} has no multi-token "
            "prediction\n"
        )
