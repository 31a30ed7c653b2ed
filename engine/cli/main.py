"""Command line of `engine`: one module for each command."""

import argparse
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from typing import Any

from agents.rundir.standard_streams import open_streams
from engine.cli.usage import Parser, refuse
from engine.cli.version import ShowVersion
from engine.config.refusal import RefusedError

# The module of each command. A command imports only its own, because all of them together delay the start of a run.
COMMANDS = {
    "run": "run",
    "plan": "planning.plan",
    "simulate": "simulate",
    "tokenize": "tokenize",
    "sample": "sample",
    "probe": "measuring.probe",
    "collectives": "measuring.collectives",
    "import-hf": "huggingface.import_hf",
    "export-hf": "huggingface.export_hf",
    "layouts": "layouts",
    "reference": "reference",
    "completion": "completion",
}


def module_of(command: str) -> Any:
    return import_module(f"engine.cli.{COMMANDS[command]}")


def parser(commands: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """The parser of the command line, with a subparser for each command in `commands`."""
    top = Parser(prog="engine", description="Train Mixture-of-Experts transformers in 4D parallel.")
    top.add_argument("--version", action=ShowVersion)
    parsers: argparse._SubParsersAction[Any] = top.add_subparsers(dest="command", parser_class=Parser)
    for command in commands:
        module_of(command).add_parser(parsers)
    if "completion" in commands:
        parsers.choices["completion"].set_defaults(parser=top)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    open_streams()
    words = sys.argv[1:] if arguments is None else arguments
    command = words[0] if words else None
    # The completion script names every command.
    one = (command,) if command in COMMANDS and command != "completion" else tuple(COMMANDS)
    options, rest = parser(one).parse_known_args(words)  # overrides may come before or after options
    if options.command is None:
        refuse(f"engine needs a command; legal: {', '.join(COMMANDS)} (see engine --help)")
    handle: Callable[[argparse.Namespace, list[str]], None] = module_of(options.command).main
    try:
        handle(options, rest)
    except RefusedError as error:
        refuse(str(error))
