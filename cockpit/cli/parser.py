"""The argument parser: the options of every command, and their help."""

import argparse
from pathlib import Path
from typing import Any, NoReturn

from cockpit.cli import commands
from cockpit.cli.argument_types import positive, ranks, reason, seconds, steps
from cockpit.cli.commands import HEADLESS
from cockpit.data.sources.connection import CockpitError
from cockpit.knobs.values import TRIAL_STEPS
from engine.cli.version import ShowVersion

TARGET = "name, folder, or ipc://, tcp:// or ssh:// URL of the run"
NEWEST = "default: the newest live run"
ONLY = "default: the live run, if there is only one"
KEY = "key file for a hub over TCP (default: COCKPIT_KEY, else a key in the folder of keys)"
LOW_BANDWIDTH = "receive only job-wide records, once a second: for a slow connection to a large run"
FILTER = 'only ranks that match, such as "pp=1 & own_ms > 1.2 * median"; an illegal filter lists the names'
NAMED_RUN = {"set", "try", "undo", "relayout", "autopilot", "profile"}  # commands that change the run
WITH_CHANGES = {"set", "preview", "try", "relayout"}  # commands with `knob=value` arguments


class _Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuse unknown arguments in the parser of the subcommand, so that the error message refers to the help of the
        subcommand, not to that of `cockpit`.
        """
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise CockpitError(f"{message} (see {self.prog} --help)")


CHANGES = {"relayout": "such as grid.tp=2", "try": "such as micro_batches=8"}
"""Help for the changes that a command takes, if they cannot be actions."""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. In the parsed arguments, the attribute `call` is the function that runs the
    chosen command."""
    top = _Parser(
        prog="cockpit",
        description="See and steer a training run. Without a command: open the newest live run in ./runs.",
    )
    top.add_argument("--version", action=ShowVersion)
    top.set_defaults(call=commands.attach, run=None, operator=False, low_bandwidth=False)
    table = top.add_subparsers(metavar="command", dest="command", parser_class=_Parser)
    _add_screens(table)
    _add_runs(table)
    _add_exports(table)
    _add_compare(table)
    for name, (call, about) in HEADLESS.items():
        command = table.add_parser(name, help=about, description=about)
        _add_headless(name, command)
        command.set_defaults(call=call)
    from cockpit.cli.curve_keys import add_to

    add_to(table.add_parser("keys", help="make, list and revoke keys for hubs over TCP"))
    from engine.completion import ABOUT, add_options

    completion = table.add_parser("completion", help=ABOUT)
    add_options(completion, "cockpit")
    completion.set_defaults(call=commands.completion, parser=top)
    hub = table.add_parser("hub", add_help=False, help="run a hub for ranks that are started separately")
    hub.set_defaults(call=commands.hub, words=[])
    relay = table.add_parser("relay", add_help=False, help="relay the ranks of one node to a hub")
    relay.set_defaults(call=commands.relay, words=[])
    from cockpit.export.incoming import command as incoming

    listen = table.add_parser("listen", help=incoming.ABOUT, description=incoming.ABOUT)
    incoming.add_options(listen)
    listen.set_defaults(call=commands.listen)
    _add_mcp(table)
    about = "print the JSON Schema of a --json output"
    schema = table.add_parser("schema", help=about, description=about)
    schema.add_argument("name", nargs="?", metavar="NAME", help="such as snapshot; default: list the names")
    schema.set_defaults(call=commands.schema)
    wrap = table.add_parser(
        "wrap", add_help=False, help="run a torch program, unchanged, and watch its training"
    )
    wrap.set_defaults(call=commands.wrap, words=[])
    return top


def _add_screens(table: Any) -> None:
    attach = table.add_parser("attach", help="open the screen on a run")
    attach.add_argument("run", nargs="?", help=f"{TARGET}; {NEWEST}")
    attach.add_argument("--operator", action="store_true", help="allow changes (default: watch only)")
    attach.add_argument("--key", metavar="FILE", help=KEY)
    attach.add_argument("--low-bandwidth", action="store_true", help=LOW_BANDWIDTH)
    attach.set_defaults(call=commands.attach)
    demo = table.add_parser("demo", help="start a run on this machine and open the screen on it")
    demo.add_argument(
        "words", nargs="*", metavar="[LAYOUT] [section.key=value ...]", help="default: layouts/demo.toml"
    )
    demo.add_argument(
        "--simulate",
        metavar="NAME|LAYOUT",
        help="simulate a published layout, such as deepseek-v3, or a TOML file; needs no torch",
    )
    demo.add_argument(
        "--speed", metavar="X|max", help="with --simulate: simulated seconds per real second (default 10)"
    )
    demo.add_argument(
        "--scenario", metavar="FILE", help="events of the simulated cluster (docs/plan/simulate.md)"
    )
    demo.add_argument("--seed", metavar="N", help="seed of the simulation")
    demo.set_defaults(call=commands.demo)
    replay = table.add_parser("replay", help="open the screen on a recorded run")
    replay.add_argument("run", nargs="?", help=f"name or folder; {NEWEST}, else the newest run")
    replay.add_argument("--at", metavar="STEP|seq:N", help="start at this position, paused")
    replay.add_argument("--speed", type=seconds, default=1.0, metavar="X", help="playback speed (default 1)")
    replay.set_defaults(call=commands.replay)


def _add_runs(table: Any) -> None:
    about = "list the runs of a folder, with the state of each"
    runs = table.add_parser("runs", help=about, description=about)
    runs.add_argument(
        "--dir", type=Path, metavar="DIR", help="folder of runs (default: COCKPIT_RUNS, else ./runs)"
    )
    runs.add_argument("--json", action="store_true", help="print one JSON record per run")
    runs.add_argument(
        "there",
        nargs="?",
        metavar="ssh://HOST[/FOLDER]",
        help="list the runs of another machine, with the cockpit there",
    )
    runs.set_defaults(call=commands.runs)
    from cockpit.cli.ssh.options import add_where

    add_where(table, NEWEST, commands.where)


def _add_exports(table: Any) -> None:
    from cockpit.export.command import FORMATS, LOOPBACK

    export = table.add_parser("export", help="export the recording of a run to another format")
    export.add_argument("named", nargs="?", metavar="RUN", help=f"name or folder; {NEWEST}")
    export.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    export.add_argument("--format", required=True, choices=FORMATS)
    export.add_argument(
        "--out",
        type=Path,
        help="file or folder to write; default: standard output, or a folder in the run's folder",
    )
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(call=commands.export)
    about = "copy each step of a live run to another program, until the run ends"
    mirror = table.add_parser("mirror", help=about, description=about)
    mirror.add_argument("named", nargs="?", metavar="RUN", help=f"{TARGET}; {NEWEST}")
    mirror.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    mirror.add_argument("--to", required=True, choices=("tensorboard", "wandb", "mlflow", "otlp"))
    mirror.add_argument(
        "--out",
        metavar="WHERE",
        help="a folder (tensorboard, wandb), a tracking URI (mlflow) or the URL of a collector (otlp); default: a "
        "folder in the run's folder, or the variables MLFLOW_TRACKING_URI and OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    mirror.add_argument("--key", metavar="FILE", help=KEY)
    mirror.set_defaults(call=commands.mirror)
    serve = table.add_parser("serve", help="serve metrics of a live run, or its screen, over HTTP")
    serve.add_argument("named", nargs="?", metavar="RUN", help=f"{TARGET}; {NEWEST}")
    serve.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    how = serve.add_mutually_exclusive_group(required=True)
    how.add_argument(
        "--prometheus",
        metavar="[ADDRESS:]PORT",
        help=f"serve metrics for Prometheus; default address {LOOPBACK}",
    )
    how.add_argument(
        "--web",
        metavar="[ADDRESS:]PORT",
        help=f"serve the screen to a browser, only on this machine and with a token; default address "
        f"{LOOPBACK}",
    )
    serve.add_argument(
        "--operator", action="store_true", help="with --web: allow changes (default: watch only)"
    )
    serve.set_defaults(call=commands.serve)


def _add_mcp(table: Any) -> None:
    about = "serve a run to an MCP client over standard input and output"
    mcp = table.add_parser("mcp", help=about, description=about)
    mcp.add_argument("run", nargs="?", help=f"{TARGET}; {NEWEST} (with --operator: if there is only one)")
    mcp.add_argument("--operator", action="store_true", help="allow changes (default: watch only)")
    mcp.add_argument("--name", default="mcp", help="name of this client in the log of the run (default mcp)")
    mcp.add_argument("--key", metavar="FILE", help=KEY)
    mcp.set_defaults(call=commands.mcp)


def _add_compare(table: Any) -> None:
    about = "print what differs between two recorded runs, and their metrics at the same steps"
    compare = table.add_parser("compare", help=about, description=about)
    compare.add_argument("first", metavar="RUN", help="name or folder of a run, live or ended")
    compare.add_argument("second", metavar="RUN", help="the run to compare it with")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.set_defaults(call=commands.compare)


def _add_headless(name: str, command: argparse.ArgumentParser) -> None:
    default = ONLY if name in NAMED_RUN else NEWEST
    command.add_argument("--run", metavar="RUN", help=f"{TARGET}; {default}")
    command.add_argument("--key", metavar="FILE", help=KEY)
    command.add_argument("--json", action="store_true", help="print JSON")
    if name not in WITH_CHANGES:
        command.add_argument("named", nargs="?", metavar="RUN", help="the same as --run RUN")
    if name == "status":
        _add_status(command)
    if name == "watch":
        command.add_argument("--low-bandwidth", action="store_true", help=LOW_BANDWIDTH)
    if name == "stacks":
        _add_stacks(command)
    if name in ("snapshot", "watch"):
        command.add_argument("--filter", metavar="TEXT", help=FILTER)
    if name == "snapshot":
        command.add_argument("--at", metavar="STEP|seq:N", help="print the recorded state at this position")
    if name in WITH_CHANGES:
        many = "*" if name == "try" else "+"
        command.add_argument(
            "changes",
            nargs=many,
            metavar="section.key=value" if name == "relayout" else "knob=value",
            help=CHANGES.get(name, "or the name of an action, such as save"),
        )
    if name == "relayout":
        command.add_argument("--dry-run", action="store_true", help="only check and preview the layout")
    if name in ("set", "undo"):
        command.add_argument("--wait", action="store_true", help="wait until every rank has switched")
    if name == "try":
        _add_trial(command)
    if name == "profile":
        _add_profile(command)
    if name == "autopilot":
        _add_autopilot(command)
    if name in ("set", "try", "undo", "relayout"):
        command.add_argument("--reason", type=reason, default="", metavar="TEXT", help="note for the log")
    if name in ("set", "try", "undo", "relayout", "profile"):
        limit = {"try": 3600.0, "relayout": 600.0, "profile": 600.0}.get(name, 60.0)
        command.add_argument(
            "--timeout", type=seconds, default=limit, metavar="S", help=f"seconds to wait (default {limit:g})"
        )


def _add_stacks(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "Exit status: 0 all ranks answered; 1 a rank, or the hub, did not; 2 no such run; 3 refused."
    )
    command.add_argument("--ranks", type=ranks, default=[], metavar="0,3,8-11", help="default: all ranks")
    command.add_argument(
        "--threads", action="store_true", help="show all threads; default: only the one that trains"
    )


def _add_profile(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "Exit status: 0 the file is written; 1 a trace is missing after --timeout; 2 no such run, or a wrong "
        "option; 3 refused."
    )
    command.add_argument(
        "--ranks",
        default="0",
        metavar="WHICH",
        help="a rank, a coordinate such as pp1, or all (default: rank 0)",
    )
    command.add_argument(
        "--steps", type=positive, default=1, metavar="N", help="number of steps: 1, 2, 3, 5, 10, 20 or 50"
    )
    command.add_argument(
        "--from", type=positive, dest="first", metavar="STEP", help="the first step (default: the next one)"
    )
    command.add_argument(
        "--out", type=Path, metavar="FILE", help="default: profile/stepNNNNNN.json.gz in the run's folder"
    )


def _add_status(command: argparse.ArgumentParser) -> None:
    from cockpit.cli.show.status import STYLES
    from cockpit.data.diagnosis.status_lines import MOST_LINES

    command.add_argument(
        "--lines",
        type=int,
        choices=range(1, MOST_LINES + 1),
        default=2,
        help="number of lines (default 2): state, diagnosis, curves, traffic, newest log entry",
    )
    command.add_argument("--watch", action="store_true", help="update the lines until the run is over")
    command.add_argument(
        "--every",
        type=seconds,
        default=1.0,
        metavar="S",
        help="with --watch: seconds between updates (default 1)",
    )
    command.add_argument(
        "--width", type=positive, metavar="N", help="columns (default: those of the terminal)"
    )
    command.add_argument(
        "--style",
        choices=STYLES,
        default="auto",
        help="colours: of the terminal, of tmux, or none (default auto)",
    )


def _add_autopilot(command: argparse.ArgumentParser) -> None:
    command.epilog = (
        "Exit status: 0 nothing more to gain, or as many changes as allowed; 1 no answer, or the run ended; "
        "3 the run cannot predict times; 4 stopped at an unexpected event; 130 interrupted, the running "
        "trial reverted."
    )
    command.add_argument(
        "--within",
        required=True,
        nargs="+",
        metavar="knob=low..high",
        help="values that the autopilot may try: a range, or a list such as recompute=none,full",
    )
    command.add_argument(
        "--steps",
        type=steps,
        default=TRIAL_STEPS,
        metavar="N",
        help=f"steps that a trial measures before a change, and again after it (default {TRIAL_STEPS})",
    )
    command.add_argument(
        "--gain",
        type=seconds,
        default=2.0,
        metavar="PERCENT",
        help="smallest predicted gain for which a change is tried, in percent (default 2)",
    )
    command.add_argument(
        "--undecided",
        action="store_true",
        help="also try changes that may make steps slower, if they are likely to gain enough",
    )
    command.add_argument(
        "--max-changes", type=positive, default=5, metavar="N", help="stop after N kept changes (default 5)"
    )
    command.add_argument(
        "--allow-loss",
        nargs="+",
        default=[],
        metavar="knob",
        help="knobs that the autopilot may try although they change the loss",
    )


def _add_trial(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--steps",
        type=steps,
        default=TRIAL_STEPS,
        metavar="N",
        help=f"steps to measure before the change, and again after it (4 to 10,000; default {TRIAL_STEPS})",
    )
    ending = command.add_mutually_exclusive_group()
    ending.add_argument("--keep", action="store_true", help="end the running trial and keep the new value")
    ending.add_argument(
        "--revert", action="store_true", help="end the running trial and revert the new value"
    )
