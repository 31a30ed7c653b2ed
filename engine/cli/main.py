"""Command line of `engine`: one module for each command."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from agents.rundir.standard_streams import open_streams
from engine.cli import completion, layouts, reference, run, sample, simulate, tokenize
from engine.cli.huggingface import export_hf, import_hf
from engine.cli.measuring import collectives, probe
from engine.cli.planning import plan
from engine.cli.usage import Parser, refuse
from engine.cli.version import ShowVersion
from engine.config.refusal import RefusedError

COMMANDS = {
    "run": run,
    "plan": plan,
    "simulate": simulate,
    "tokenize": tokenize,
    "sample": sample,
    "probe": probe,
    "collectives": collectives,
    "import-hf": import_hf,
    "export-hf": export_hf,
    "layouts": layouts,
    "reference": reference,
    "completion": completion,
}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = Parser(prog="engine", description="Train Mixture-of-Experts transformers in 4D parallel.")
    top.add_argument("--version", action=ShowVersion)
    commands: argparse._SubParsersAction[Any] = top.add_subparsers(dest="command", parser_class=Parser)
    for command in COMMANDS.values():
        command.add_parser(commands)
    commands.choices["completion"].set_defaults(parser=top)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    open_streams()
    options, rest = parser().parse_known_args(arguments)  # overrides may come before or after options
    if options.command is None:
        refuse(f"engine needs a command; legal: {', '.join(COMMANDS)} (see engine --help)")
    handle: Callable[[argparse.Namespace, list[str]], None] = COMMANDS[options.command].main
    try:
        handle(options, rest)
    except RefusedError as error:
        refuse(str(error))
