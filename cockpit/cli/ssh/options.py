"""The options of `cockpit where`, in their own module, so that the parser does not import the command."""

import argparse
from collections.abc import Callable
from typing import Any


def add_where(table: Any, newest: str, call: Callable[[argparse.Namespace], int]) -> None:
    """Add the parser of the command `cockpit where` to `table`, the subparsers of `cockpit`. `newest`: the words of the
    help text that say which run is used by default."""
    about = "print the sockets or the TCP address of a run's hub, as JSON"
    where = table.add_parser("where", help=about, description=about)
    where.add_argument("named", nargs="?", metavar="RUN", help=f"name or folder of the run; {newest}")
    where.add_argument("--run", metavar="RUN", help=argparse.SUPPRESS)
    where.add_argument(
        "--operator", action="store_true", help="the sockets for a client that changes the run"
    )
    where.add_argument(
        "--hold",
        action="store_true",
        help="then wait until standard input is closed, as for cockpit attach ssh://...",
    )
    where.add_argument("--json", action="store_true", help="print JSON (the only format)")
    where.set_defaults(call=call)
