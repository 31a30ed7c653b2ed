"""``cockpit listen``: receives the metrics and spans that training programs export with OpenTelemetry, and shows each
program as a run."""

import argparse
import ipaddress
import signal
from collections.abc import Mapping, Sequence

from cockpit.data.sources.connection import CockpitError
from cockpit.export.command import LOOPBACK, listen_address, needing
from cockpit.printing import print_line

ABOUT = "show as runs what training programs export with OpenTelemetry, such as Megatron-LM"
EXTRA = "train-cockpit[listen]"
WORK_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `cockpit listen` to its parser."""
    parser.add_argument(
        "--otlp",
        metavar="[ADDRESS:]PORT",
        default="4318",
        help=f"receive OTLP over HTTP, on a loopback address only (default {LOOPBACK}:4318)",
    )
    parser.add_argument(
        "--name", default="", metavar="RUN", help="name of the run (default: the name of the service)"
    )
    parser.add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME=FIELD",
        help="also read the metric NAME, as loss, step_ms, grad_norm, lr, tokens_per_s, mfu, memory_bytes, skipped or "
        "step",
    )


def listen(otlp: str, name: str, named: Sequence[str]) -> int:
    """Receive exports until the command is interrupted. `otlp`: PORT or ADDRESS:PORT. `name`: the name of every run; if
    it is "", a run is named after its program's OpenTelemetry `service.name`. `named`: additional metrics to read, as
    ``METRIC=FIELD``. Raises CockpitError if it cannot listen.
    """
    host, port = listen_address(otlp)
    if len(name) > 64:
        raise CockpitError("the name of a run has at most 64 characters")
    if not ipaddress.ip_address(host).is_loopback:
        raise CockpitError(
            f"{host} is not a loopback address, and OTLP has no keys; listen on {LOOPBACK}, and forward the port with "
            "ssh -R from the machine that exports"
        )
    with needing("opentelemetry", "receiving OpenTelemetry", EXTRA):
        from cockpit.export.http_server import BoundedServer
        from cockpit.export.incoming.exports import FIELDS, METRICS, Quantity
        from cockpit.export.incoming.receiver import Receiver
        from cockpit.export.incoming.runs import ExportedRuns
    names = {**METRICS, **{metric: Quantity(field) for metric, field in _pairs(named, FIELDS).items()}}
    runs = ExportedRuns(name, lambda opened: print_line(f"run {opened}: cockpit attach shows it"))
    receiver = Receiver(runs, names)
    try:
        server = BoundedServer(host, port, receiver, "otlp")
    except OSError as error:
        raise CockpitError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        shown = f"[{host}]" if ":" in host else host
        print_line(f"receives OTLP over HTTP at http://{shown}:{server.server_port}; ctrl+c ends it")
        while True:
            receiver.work(WORK_S)
    finally:
        signal.signal(signal.SIGTERM, previous)
        server.close()
        runs.close()


def _pairs(named: Sequence[str], fields: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for one in named:
        metric, equals, field = one.rpartition("=")
        if not (metric and equals and field in fields):
            raise CockpitError(
                f"--metric {one[:80]} is not legal; legal: NAME=FIELD, with one of {', '.join(fields)}"
            )
        found[metric] = field
    return found
