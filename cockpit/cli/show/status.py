"""``cockpit status``: the state of a run in one to five lines, once or repeatedly, for a status bar."""

import os
import shutil
import sys
import time
from collections.abc import Sequence

from agents.rundir.runs import newest_live
from cockpit.cli.exit_status import DONE, FAILED
from cockpit.data import plain
from cockpit.data.diagnosis.statement import Level
from cockpit.data.diagnosis.status_lines import Line, status_lines
from cockpit.data.format import wrapped
from cockpit.data.link import LinkState
from cockpit.data.sources.connection import ANSWER_S, CockpitError, Connection, runs_dir
from cockpit.printing import print_json, print_line, write_terminal

STYLES = ("auto", "plain", "ansi", "tmux")
# SGR colours, which the terminal takes from its palette
COLOUR = {
    Level.GOOD: 32,
    Level.NOTE: 0,
    Level.WARN: 33,
    Level.BAD: 31,
}
TMUX = {Level.GOOD: "green", Level.NOTE: "default", Level.WARN: "yellow", Level.BAD: "red"}
RETRY_S = 2.0
NO_RUN = "no live run"


def status(
    run: str | None, lines: int, watch: bool, every_s: float, width: int | None, style: str, as_json: bool
) -> int:
    """Print the status lines; with `watch`, update them every `every_s` seconds until the run is over."""
    if style == "auto":
        no_colour = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        style = "plain" if no_colour or not sys.stdout.isatty() else "ansi"
    columns = width or shutil.get_terminal_size().columns
    if not watch:
        with _connected(run) as connection:
            return _print(connection, lines, columns, style, as_json)
    return _watch(run, lines, every_s, columns, style, as_json)


def _connected(run: str | None) -> Connection:
    connection = Connection(run, low_bandwidth=True)
    try:
        connection.wait_for_snapshot(ANSWER_S)
    except BaseException:
        connection.close()
        raise
    return connection


def _print(connection: Connection, lines: int, width: int, style: str, as_json: bool) -> int:
    store = connection.store
    if as_json:
        print_json(plain.overview(store))
    else:
        _print_lines(status_lines(store, lines, width), style, 0)
    return FAILED if store.link is LinkState.FAILED else DONE


def _watch(run: str | None, lines: int, every_s: float, width: int, style: str, as_json: bool) -> int:
    """Update the status lines until the run is over. While no hub can be reached, print the reason and retry. Without a
    named run, follow the newest live run; if its hub falls silent, switch to the run that is the newest then."""
    above = 0  # lines to overwrite
    while True:
        try:
            connection = _connected(run)
        except CockpitError as error:
            if as_json:
                print_json({"run": None, "why": str(error)})
            else:
                above = _print_lines(_reason(error, lines, width), style, above)
            time.sleep(max(every_s, RETRY_S))
            continue
        with connection:
            while run is not None or not _replaced(connection):
                store = connection.store
                if as_json:
                    print_json(plain.overview(store))
                else:
                    above = _print_lines(status_lines(store, lines, width), style, above)
                if store.link in (LinkState.ENDED, LinkState.FAILED):
                    return DONE if store.link is LinkState.ENDED else FAILED
                until = time.monotonic() + every_s
                while (left := until - time.monotonic()) > 0:
                    connection.poll(left)


def _replaced(connection: Connection) -> bool:
    """Whether the hub is silent, and another run is now the newest live run."""
    if connection.store.link is not LinkState.STALE:
        return False
    newest = newest_live(runs_dir())
    return bool(newest and newest.hub and newest.hub.endpoints.clients != connection.client.endpoint)


def _reason(error: CockpitError, lines: int, width: int) -> list[Line]:
    """At most `lines` lines of text that say why no run is shown."""
    text = wrapped(f"· {NO_RUN}: {error}", max(8, width), max_lines=lines, placeholder=" …")
    return [(Level.NOTE, line) for line in text]


def _print_lines(lines: Sequence[Line], style: str, above: int) -> int:
    """Print the lines. On a terminal and with the style `ansi`, they overwrite the lines of the previous call;
    `above` is the number of those lines. Returns the number of lines that the next call has to overwrite.
    """
    over = style == "ansi" and sys.stdout.isatty()
    if over and above:
        write_terminal(f"\x1b[{above}A")
    for level, text in lines:
        if over:
            write_terminal("\x1b[2K")
        if style == "ansi" and COLOUR[level]:
            write_terminal(f"\x1b[{COLOUR[level]}m")
            print_line(text)
            write_terminal("\x1b[0m")
        elif style == "tmux":
            print_line(f"#[fg={TMUX[level]}]{text.replace('#', '##')}#[default]")
        else:
            print_line(text)
    if over and above > len(lines):
        write_terminal("\x1b[J")
    return len(lines)
