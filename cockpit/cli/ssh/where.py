"""``cockpit where``: prints how to reach the hub of a run. `cockpit attach ssh://...` runs this command on the other
machine."""

import os
import sys

from msgspec import Struct

from agents.transport.addresses import Endpoints
from cockpit.cli.exit_status import DONE
from cockpit.data import plain
from cockpit.data.sources.connection import endpoints
from cockpit.printing import print_json
from engine.cli.version import version


class Where(Struct, frozen=True, omit_defaults=True):
    """The sockets, or the TCP address, at which the hub of a run listens for clients."""

    cockpit: str  # the release that answers
    clients: str  # ipc:// or tcp:// URL; for a viewer, the socket at which the hub refuses changes
    viewers: str = ""  # ipc:// URL
    hub: str = ""  # over TCP: the hub's public key


def where(run: str | None, operator: bool, hold: bool) -> int:
    """Print the endpoints of the run's hub as one JSON record. With `hold`, do not return until standard input is
    closed, so that the ssh connection stays open."""
    print_json(plain.plain(_where(endpoints(run), operator)))
    if hold:
        while os.read(sys.stdin.fileno(), 4096):
            pass
    return DONE


def _where(found: Endpoints, operator: bool) -> Where:
    if operator or not found.viewers:
        return Where(version(), found.clients, found.viewers, found.hub)
    return Where(version(), found.viewers, found.viewers)
