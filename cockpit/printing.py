"""Prints the output of headless commands. Every line that a headless command prints goes through this module. This
module removes control characters, because names, reasons and values come from runs and files.
"""

import sys
from collections.abc import Sequence

from cockpit.data import plain
from cockpit.data.diagnosis.status import SIMULATED
from cockpit.data.format import clean
from cockpit.data.run_folders.final_summary import final_summary, outcome_rows, title
from cockpit.data.store import Store

LABEL = 12  # columns of a label


def print_line(line: str) -> None:
    """Print one line of text and flush it, so that the reader of a pipe receives it immediately."""
    _write(clean(line))


def print_json(record: object) -> None:
    """Print one line of JSON."""
    _write(plain.to_json(record))


def complain(sentence: str) -> None:
    """Print one line on standard error."""
    sys.stderr.write(f"{clean(sentence)}\n")
    sys.stderr.flush()


def run_mark(store: Store) -> str:
    """The end of a line that answers a command: which run answers, and whether it is simulated."""
    mark = f" · run {store.run_name}" if store.run_name else ""
    return f"{mark}  {SIMULATED}" if store.simulated else mark


def print_script(script: str) -> None:
    """Print a shell script unchanged. `script` must not contain text from a run."""
    sys.stdout.write(script)
    sys.stdout.flush()


def write_terminal(code: str) -> None:
    """Write a terminal control sequence, which must not contain text from a run."""
    sys.stdout.write(code)
    sys.stdout.flush()


def print_table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print columns as wide as their longest cell; the columns in `right` are right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print_line("  ".join(cells).rstrip())


def print_final_summary(store: Store) -> None:
    """Print the final summary of a run that has ended or was stopped. Print nothing if no step was completed."""
    with store.lock:
        if store.step is None:
            return
        found = final_summary(store)
    print_line(title(found))
    for label, text in outcome_rows(found):
        print_line(f"  {label:<{LABEL}}{text}")


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def report_missing(missing: Sequence[str], note: str = "") -> int:
    """Print on stderr which parts of a recording are missing. Return the exit status of the command."""
    for text in missing:
        complain(f"incomplete: {text}")
    if note:
        complain(note)
    return 1 if missing else 0
