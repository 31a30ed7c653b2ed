"""The command `cockpit`.

Exit: 0 done, 1 failed, 2 not understood or no such run, 3 the run refused a change, 141 the reader of the output has
left.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from agents.protocol import MOST_TRIAL_STEPS
from agents.protocol.base import RunError
from agents.rundir.standard_streams import discard_output, fit_output, open_streams, output_failure
from agents.transport.keys import KEY_VARIABLE, Role, load_key
from cockpit.data.connection import CockpitError
from cockpit.knobs.values import TRIAL_STEPS
from cockpit.printing import complain

Options = argparse.Namespace
USAGE = 2
READER_LEFT = 128 + signal.SIGPIPE  # as a shell sees a filter whose reader has left (`cockpit watch | head`)
TARGET = "its name, folder, or ipc:// or tcp:// URL"
KEY = "over TCP: the key to come under (default one of COCKPIT_KEY, else of the folder of keys)"
SCREEN_NEEDS = ("textual", "plotext")  # headless commands do without


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CockpitError(f"{message} (see {self.prog} --help)")


def _attach(options: Options) -> int:
    from cockpit.tui.open import attach

    return attach(options.run, options.operator, options.low_bandwidth)


def _demo(options: Options) -> int:
    from cockpit.cli.demo import run_demo

    return run_demo(options.words)


def _snapshot(options: Options) -> int:
    from cockpit.cli.headless import snapshot

    return snapshot(options.run, options.at, options.json)


def _watch(options: Options) -> int:
    from cockpit.cli.headless import watch

    return watch(options.run, options.json, options.low_bandwidth)


def _replay(options: Options) -> int:
    from cockpit.tui.open import replay

    return replay(options.run, options.at, options.speed)


def _export(options: Options) -> int:
    from cockpit.export.command import export

    return export(options.run, options.format, options.out, options.json)


def _serve(options: Options) -> int:
    from cockpit.export.command import serve

    return serve(options.run, options.prometheus)


def _knobs(options: Options) -> int:
    from cockpit.cli.headless import knobs

    return knobs(options.run, options.json)


def _set(options: Options) -> int:
    from cockpit.cli.headless import change

    return change(options.run, options.changes, options.wait, options.timeout, options.json, options.reason)


def _preview(options: Options) -> int:
    from cockpit.cli.steering import preview

    return preview(options.run, options.changes, options.json)


def _try(options: Options) -> int:
    from cockpit.cli.steering import decide, try_out

    if options.keep or options.revert:
        if options.changes:
            raise CockpitError("--keep and --revert end the trial under way; they take no knob")
        return decide(options.run, options.keep, options.timeout, options.json)
    if len(options.changes) != 1:
        raise CockpitError("a trial is of one knob: cockpit try knob=value [--steps N]")
    return try_out(options.run, options.changes, options.steps, options.reason, options.timeout, options.json)


def _undo(options: Options) -> int:
    from cockpit.cli.steering import undo

    return undo(options.run, options.wait, options.reason, options.timeout, options.json)


def _log(options: Options) -> int:
    from cockpit.cli.headless import log

    return log(options.run, options.json)


def _hub(options: Options) -> int:
    from agents.hub.process import main

    return main(options.words, "cockpit hub", in_terminal=True)


def _relay(options: Options) -> int:
    from agents.hub.relay.process import main

    return main(options.words, "cockpit relay", in_terminal=True)


LOW_BANDWIDTH = "once a second, and of the whole job only: for a thin line to a large run"
OWN_OPTIONS = {"hub": _hub, "relay": _relay}

HEADLESS: dict[str, tuple[Callable[[Options], int], str]] = {
    "snapshot": (_snapshot, "the whole state, once"),
    "watch": (_watch, "follow a run: a line a step, or every update with --json"),
    "knobs": (_knobs, "the knob board: values and what is legal"),
    "preview": (_preview, "what a change would do, as far as the run can tell"),
    "set": (_set, "change knobs of a live run, all or none; or pause, resume, stop, save, profile=N"),
    "try": (_try, "try a knob for some steps: kept if the run is clearly faster, else taken back"),
    "undo": (_undo, "take back the newest change that is not undone yet"),
    "log": (_log, "events, and every change with what became of it"),
}
CHANGING = {"set", "preview", "try"}  # these have words of their own


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _add_exports(commands: Any) -> None:
    from cockpit.export.command import FORMATS, LOOPBACK

    export = commands.add_parser("export", help="write the recording of a run for other programs")
    export.add_argument(
        "named", nargs="?", metavar="RUN", help="its name or folder; absent: the newest live one"
    )
    export.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    export.add_argument("--format", required=True, choices=FORMATS)
    export.add_argument(
        "--out",
        type=Path,
        help="a file, or a folder for several; absent: standard output, or one in the run's",
    )
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(call=_export)
    serve = commands.add_parser("serve", help="serve a live run to other programs")
    serve.add_argument("named", nargs="?", metavar="RUN", help="a name, folder or ipc:// URL")
    serve.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    serve.add_argument(
        "--prometheus", required=True, metavar="[ADDRESS:]PORT", help=f"to scrape; default address {LOOPBACK}"
    )
    serve.set_defaults(call=_serve)


def steps(text: str) -> int:
    value = int(text)
    if not 4 <= value <= MOST_TRIAL_STEPS:
        raise ValueError
    return value


def _add_steering(name: str, command: argparse.ArgumentParser) -> None:
    """The options of commands that change a run."""
    if name in ("set", "preview", "try"):
        many = "*" if name == "try" else "+"
        command.add_argument(
            "changes", nargs=many, metavar="knob=value", help="or an action's name, such as save"
        )
    if name in ("set", "undo"):
        command.add_argument("--wait", action="store_true", help="until every rank has switched")
    if name == "try":
        command.add_argument(
            "--steps",
            type=steps,
            default=TRIAL_STEPS,
            metavar="N",
            help=f"to measure before, and again after (4 to 10,000; default {TRIAL_STEPS})",
        )
        ending = command.add_mutually_exclusive_group()
        ending.add_argument(
            "--keep", action="store_true", help="end the trial under way: what is tried stays"
        )
        ending.add_argument("--revert", action="store_true", help="end the trial under way: take it back now")
    if name in ("set", "try", "undo"):
        command.add_argument("--reason", default="", metavar="TEXT", help="for the log")
        limit = 3600.0 if name == "try" else 60.0
        command.add_argument(
            "--timeout", type=seconds, default=limit, metavar="S", help=f"give up waiting (default {limit:g})"
        )


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="cockpit",
        description="See and steer a training run. Without a command: open the newest live run in ./runs.",
    )
    top.set_defaults(call=_attach, run=None, operator=False, low_bandwidth=False)
    commands = top.add_subparsers(metavar="command", parser_class=_Parser)
    attach = commands.add_parser("attach", help="open the screen on a run")
    attach.add_argument("run", nargs="?", help=f"{TARGET}; absent: the newest live one")
    attach.add_argument(
        "--operator", action="store_true", help="allow changes (a cockpit only watches otherwise)"
    )
    attach.add_argument("--key", metavar="FILE", help=KEY)
    attach.add_argument("--low-bandwidth", action="store_true", help=LOW_BANDWIDTH)
    attach.set_defaults(call=_attach)
    demo = commands.add_parser("demo", help="start a run on this machine and open the screen on it")
    demo.add_argument(
        "words", nargs="*", metavar="[LAYOUT] [section.key=value ...]", help="default layouts/demo.toml"
    )
    demo.set_defaults(call=_demo)
    replay = commands.add_parser("replay", help="open the screen on a recorded run")
    replay.add_argument(
        "run", nargs="?", help="its name or folder; absent: the newest live one, or the newest"
    )
    replay.add_argument("--at", metavar="STEP|seq:N", help="begin there, paused")
    replay.add_argument("--speed", type=seconds, default=1.0, metavar="X", help="times as fast as it was")
    replay.set_defaults(call=_replay)
    _add_exports(commands)
    for name, (call, about) in HEADLESS.items():
        command = commands.add_parser(name, help=about, description=about)
        command.add_argument("--run", metavar="RUN", help=f"{TARGET}; absent: the newest live one")
        command.add_argument("--key", metavar="FILE", help=KEY)
        command.add_argument("--json", action="store_true", help="print JSON")
        if name not in CHANGING:
            # The run may be named without --run where no other words are expected.
            command.add_argument("named", nargs="?", metavar="RUN", help=argparse.SUPPRESS)
        if name == "watch":
            command.add_argument("--low-bandwidth", action="store_true", help=LOW_BANDWIDTH)
        if name == "snapshot":
            command.add_argument(
                "--at", metavar="STEP|seq:N", help="of the run's recording, not as it is now"
            )
        _add_steering(name, command)
        command.set_defaults(call=call)
    from cockpit.cli.keys import add_to

    add_to(commands.add_parser("keys", help="make, list and revoke the keys that hubs take over TCP"))
    hub = commands.add_parser("hub", add_help=False, help="run a hub by itself, for ranks that others start")
    hub.set_defaults(call=_hub, words=[])
    relay = commands.add_parser("relay", add_help=False, help="speak to a hub for the ranks of one node")
    relay.set_defaults(call=_relay, words=[])
    return top


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    try:
        try:
            return _called(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()  # of --help too; at exit a reader that has left would cost a traceback
    except CockpitError as error:
        complain(str(error))
        return USAGE
    except ModuleNotFoundError as error:
        if error.name not in SCREEN_NEEDS:
            raise
        complain(f"the screen needs {error.name}; pip install 'train-cockpit[cockpit]' brings it")
        return USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except OSError as error:
        why = output_failure(error)
        if why is None:
            raise
        discard_output()
        complain(why)
        return 1


def _called(given: list[str]) -> int:
    if given and given[0] in OWN_OPTIONS:
        return OWN_OPTIONS[given[0]](Options(words=given[1:]))
    options = parser().parse_args(given)
    fit_output(getattr(options, "json", False))
    options.run = options.run or getattr(options, "named", None)
    if getattr(options, "key", None):
        _use_key(options.key)
    status: int = options.call(options)
    return status


def _use_key(file: str) -> None:
    """Of a cockpit, where every command looks."""
    try:
        role = load_key(Path(file)).role
    except RunError as error:
        raise CockpitError(str(error)) from None
    if role == Role.RANK:
        raise CockpitError(f"{file} is a key of role rank, and this takes one of role viewer or operator")
    os.environ[KEY_VARIABLE] = file


def main() -> None:
    open_streams()
    raise SystemExit(run())
