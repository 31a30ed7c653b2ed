"""The table of commands: the function and the help text of each. A command's module is imported only when the command
is called.
"""

import argparse
from collections.abc import Callable

from cockpit.data.sources.connection import CockpitError

Options = argparse.Namespace
Call = Callable[[Options], int]


def attach(options: Options) -> int:
    from cockpit.tui.terminal.pauses import start_without_pauses

    start_without_pauses()
    from cockpit.tui.open import attach

    return attach(options.run, options.operator, options.low_bandwidth)


def demo(options: Options) -> int:
    from cockpit.tui.terminal.pauses import start_without_pauses

    start_without_pauses()
    from cockpit.cli.demo import Simulation, run_demo

    given = {
        name: value for name in ("speed", "scenario", "seed") if (value := getattr(options, name)) is not None
    }
    if options.simulate is None:
        if given:
            raise CockpitError(f"--{next(iter(given))} needs --simulate NAME, such as --simulate deepseek-v3")
        return run_demo(options.words)
    return run_demo(options.words, Simulation(options.simulate, **given))


def replay(options: Options) -> int:
    from cockpit.tui.terminal.pauses import start_without_pauses

    start_without_pauses()
    from cockpit.tui.open import replay

    return replay(options.run, options.at, options.speed)


def where(options: Options) -> int:
    from cockpit.cli.ssh.where import where

    return where(options.run, options.operator, options.hold)


def runs(options: Options) -> int:
    if options.there is not None:
        from cockpit.cli.ssh.runs import remote_runs

        if options.dir is not None:
            raise CockpitError(
                "--dir names a folder of this machine; on another one: cockpit runs ssh://HOST/FOLDER"
            )
        return remote_runs(options.there, options.json)
    from cockpit.cli.show.runs import runs

    return runs(options.dir, options.json)


def compare(options: Options) -> int:
    from cockpit.cli.show.compare import compare

    return compare(options.first, options.second, options.json)


def export(options: Options) -> int:
    from cockpit.export.command import export

    return export(options.run, options.format, options.out, options.json)


def mirror(options: Options) -> int:
    from cockpit.export.mirror.command import mirror

    return mirror(options.run, options.to, options.out)


def serve(options: Options) -> int:
    if options.web:
        return _serve_web(options)
    if options.operator:
        raise CockpitError("--operator needs --web: clients of the metrics cannot change a run")
    from cockpit.export.command import serve

    return serve(options.run, options.prometheus)


def _serve_web(options: Options) -> int:
    from cockpit.data.sources.connection import address, target
    from cockpit.printing import print_line
    from cockpit.tui.terminal.web import serve_web

    address(options.run, options.operator)  # raises the error here instead of in each browser tab
    return serve_web(target(options.run), options.web, options.operator, print_line)


def listen(options: Options) -> int:
    from cockpit.export.incoming.command import listen

    return listen(options.otlp, options.name, options.metric)


def completion(options: Options) -> int:
    from cockpit.cli.completion import completion

    return completion(options.parser, options.shell)


def hub(options: Options) -> int:
    from agents.hub.process import main

    return main(options.words, "cockpit hub", in_terminal=True)


def relay(options: Options) -> int:
    from agents.hub.relay.process import main

    return main(options.words, "cockpit relay", in_terminal=True)


def schema(options: Options) -> int:
    from cockpit.cli.schemas.command import print_schema

    return print_schema(options.name)


def mcp(options: Options) -> int:
    from cockpit.cli.mcp.server import serve

    return serve(options.run, options.operator, options.name)


def wrap(options: Options) -> int:
    from cockpit.cli.wrap import wrap

    return wrap(options.words)


# ------------------------------------------------------------------------------------- headless commands


def _snapshot(options: Options) -> int:
    from cockpit.cli.show.headless import snapshot

    return snapshot(options.run, options.at, options.json, options.filter)


def _status(options: Options) -> int:
    from cockpit.cli.show.status import status

    return status(
        options.run,
        options.lines,
        options.watch,
        options.every,
        options.width,
        options.style,
        options.json,
    )


def _watch(options: Options) -> int:
    from cockpit.cli.show.headless import watch

    return watch(options.run, options.json, options.low_bandwidth, options.filter)


def _knobs(options: Options) -> int:
    from cockpit.cli.show.headless import knobs

    return knobs(options.run, options.json)


def _info(options: Options) -> int:
    from cockpit.cli.show.info import info

    return info(options.run, options.json)


def _log(options: Options) -> int:
    from cockpit.cli.show.headless import log

    return log(options.run, options.json)


def _stacks(options: Options) -> int:
    from cockpit.cli.show.stacks import stacks

    return stacks(options.run, options.ranks, options.threads, options.json)


def _preview(options: Options) -> int:
    from cockpit.cli.steer.steering import preview

    return preview(options.run, options.changes, options.json)


def _set(options: Options) -> int:
    from cockpit.cli.steer.steering import change

    return change(options.run, options.changes, options.wait, options.timeout, options.json, options.reason)


def _try(options: Options) -> int:
    from cockpit.cli.steer.steering import end_trial, start_trial

    if options.keep or options.revert:
        if options.changes:
            raise CockpitError("--keep and --revert end the running trial; they take no knob")
        return end_trial(options.run, options.keep, options.timeout, options.json)
    if not options.changes:
        raise CockpitError("a trial needs a change: cockpit try knob=value [knob=value ...] [--steps N]")
    return start_trial(
        options.run, options.changes, options.steps, options.reason, options.timeout, options.json
    )


def _advise(options: Options) -> int:
    from cockpit.cli.steer.advise import advise_run

    return advise_run(options.run, options.json)


def _autopilot(options: Options) -> int:
    from cockpit.cli.steer.autopilot import Options as Allowed
    from cockpit.cli.steer.autopilot import fly

    allowed = Allowed(
        options.within,
        options.steps,
        options.gain,
        options.max_changes,
        options.allow_loss,
        options.undecided,
        options.json,
    )
    return fly(options.run, allowed)


def _relayout(options: Options) -> int:
    from cockpit.cli.steer.relayout import relayout

    return relayout(
        options.run, options.changes, options.dry_run, options.reason, options.timeout, options.json
    )


def _profile(options: Options) -> int:
    from cockpit.cli.steer.profile import profile

    return profile(
        options.run,
        options.steps,
        options.ranks,
        options.first,
        options.out,
        options.timeout,
        options.json,
    )


def _undo(options: Options) -> int:
    from cockpit.cli.steer.steering import undo

    return undo(options.run, options.wait, options.reason, options.timeout, options.json)


CHANGING = frozenset({_set, _try, _undo, _relayout, _autopilot, _profile, _stacks})
"""Commands that need the role operator."""

OVER_SSH = CHANGING | {
    attach,
    mirror,
    serve,
    mcp,
    _snapshot,
    _status,
    _watch,
    _knobs,
    _info,
    _log,
    _preview,
    _advise,
}
"""Commands that can reach a run by an ``ssh://`` URL, because they need only its hub."""

OWN_PARSER: dict[str, Call] = {"hub": hub, "relay": relay, "wrap": wrap}

HEADLESS: dict[str, tuple[Call, str]] = {
    "snapshot": (_snapshot, "print the state of a run once"),
    "status": (_status, "print the state and diagnosis in one to five lines, for a status bar"),
    "watch": (_watch, "follow a run: one line per step, or every update with --json"),
    "knobs": (_knobs, "print the knobs: values and legal values"),
    "stacks": (_stacks, "print what each rank is executing, and which ranks differ from the others"),
    "preview": (_preview, "print what a change would do, as estimated by the run"),
    "advise": (_advise, "name what bounds the run, and rank changes by their predicted gain"),
    "set": (_set, "change knobs of a live run, all or none; or pause, resume, stop, save, profile=N"),
    "relayout": (
        _relayout,
        "change the parallel layout of a live run: save, restart the ranks, resume",
    ),
    "try": (_try, "try a knob for some steps: keep the value if the run is clearly faster, else revert it"),
    "autopilot": (_autopilot, "try advised changes within bounds; stop at the first unexpected event"),
    "undo": (_undo, "revert the newest change that is still in force"),
    "profile": (_profile, "trace some steps of chosen ranks with torch.profiler, into one file for Perfetto"),
    "info": (_info, "print the settings, files and results of a run"),
    "log": (_log, "print events, and every change with its outcome"),
}
