"""What commands without a screen print."""

import sys
from collections.abc import Sequence


def say(line: str) -> None:
    """One line at once, so that a pipe sees it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def table(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Columns as wide as they need to be; those in `right` are set to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())
