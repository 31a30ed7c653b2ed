"""What commands without a screen print: the one door to standard output and standard error.

A line of text passes through `clean` here, whatever it is made of: names, reasons and values come from runs and files.
"""

import sys
from collections.abc import Sequence

from cockpit.data import plain
from cockpit.data.format import clean


def say(line: str) -> None:
    """One line at once, so that a pipe sees it."""
    _write(clean(line))


def say_json(record: object) -> None:
    """One line of JSON."""
    _write(plain.to_json(record))


def complain(sentence: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"{clean(sentence)}\n")
    sys.stderr.flush()


def table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Columns as wide as they need to be; those in `right` are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell_missing(missing: Sequence[str], note: str = "") -> int:
    """Say on stderr what a recording lacks; the exit status of a command that shows the rest of it."""
    for text in missing:
        complain(f"this is not all: {text}")
    if note:
        complain(note)
    return 1 if missing else 0
