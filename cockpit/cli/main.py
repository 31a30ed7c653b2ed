"""The command `cockpit`: parses the command line, runs the command, and converts errors to an exit status."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from agents.protocol.base import RunError
from agents.rundir.standard_streams import discard_output, fit_output, open_streams, output_failure
from agents.transport.curve_keys import KEY_VARIABLE, load_key
from agents.transport.roles import Role
from cockpit.cli.commands import CHANGING, OVER_SSH, OWN_PARSER, Options
from cockpit.cli.exit_status import FAILED, INTERRUPTED, READER_LEFT, USAGE
from cockpit.cli.parser import parser
from cockpit.data.sources.connection import CockpitError
from cockpit.data.sources.ssh_sockets import is_ssh
from cockpit.printing import complain

SOME_NEED = {"shtab": "cockpit", "textual": "cockpit", "textual_serve": "web", "aiohttp": "web", "mcp": "mcp"}
"""Libraries that only some commands import, and the extra that installs each."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        try:
            return _call(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # flush here: at interpreter exit, a closed pipe would print a traceback
    except CockpitError as error:
        complain(str(error))
        return USAGE
    except ModuleNotFoundError as error:
        if error.name not in SOME_NEED:
            raise
        complain(f"this needs {error.name}: pip install 'train-cockpit[{SOME_NEED[error.name]}]'")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except OSError as error:
        why = output_failure(error)
        if why is None:
            raise
        discard_output()
        complain(why)
        return FAILED


def _call(words: list[str]) -> int:
    if words and words[0] in OWN_PARSER:
        return OWN_PARSER[words[0]](Options(words=words[1:]))
    options = parser().parse_args(words)
    fit_output(getattr(options, "json", False))
    options.run = options.run or getattr(options, "named", None)
    if getattr(options, "key", None):
        _use_key(options.key)
    with _tunnel(options):
        status: int = options.call(options)
        return status


def _tunnel(options: Options) -> AbstractContextManager[None]:
    """Context manager in which the command runs. If the run is given as an ``ssh://`` URL, it keeps a tunnel to the
    run's machine open; otherwise it does nothing."""
    if not is_ssh(options.run):
        return nullcontext()
    from cockpit.cli.ssh.tunnel import tunnel_to

    if options.call not in OVER_SSH:
        raise CockpitError(
            f"this command reads files of the run's machine; run it there: ssh HOST cockpit {options.command}"
        )
    return tunnel_to(options.run, options.call in CHANGING or getattr(options, "operator", False))


def _use_key(file: str) -> None:
    """Check the key file, and pass its path to the command in the environment variable `COCKPIT_KEY`."""
    try:
        role = load_key(Path(file)).role
    except RunError as error:
        raise CockpitError(str(error)) from None
    if role == Role.RANK:
        raise CockpitError(f"{file} is a key of role rank; the cockpit needs one of role viewer or operator")
    os.environ[KEY_VARIABLE] = file


def main() -> None:
    """Run the command that this process was started with, and exit."""
    open_streams()
    raise SystemExit(run())
