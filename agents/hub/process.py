"""The hub as a process: options, run folder and sockets, signals, exit code."""

import argparse
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agents.alerts.notify import Notifier
from agents.hub.memory_limit import LEAST_MB, MEMORY_MB, MemoryLimit
from agents.hub.recorder import DEFAULT_RECORD_MB, Limits
from agents.hub.server import Hub
from agents.protocol import clean
from agents.rundir.hub_file import lock_for_hub, read_hub_file
from agents.rundir.hub_supervisor import ON_ALERT, ending_signals
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import (
    check_socket_directory,
    endpoints_in,
    make_socket_directory,
    remove_sockets,
)
from agents.transport.addresses import LEGAL as LEGAL_LISTEN
from agents.transport.addresses import Endpoints, listen_address
from agents.transport.curve_keys import KeyStore, keys_folder
from agents.transport.limits import check_room, raise_file_limit


def _endpoints(folder: Path, sockets: Path | None) -> Endpoints:
    """The ipc endpoints: in the directory `sockets` if given, else in the previous hub's directory, else in a new
    directory.
    """
    if sockets is None:
        with contextlib.suppress(RunError):
            sockets = read_hub_file(folder).endpoints.directory
    if sockets is None:
        return endpoints_in(make_socket_directory())
    check_socket_directory(sockets)
    return endpoints_in(sockets)


def _places(listen: str | None, folder: Path) -> list[str]:
    """The TCP addresses to try, in order; with an automatic port, the previous hub's port comes first."""
    if listen is None:
        return []
    host, port = listen_address(listen)
    with contextlib.suppress(RunError):
        before = read_hub_file(folder).tcp
        if port == 0 and before and before.ranks.startswith(f"tcp://{host}:"):
            return [before.ranks, listen]
    return [listen]


def main(
    words: Sequence[str] | None = None, prog: str = "python -m agents.hub", in_terminal: bool = False
) -> int:
    """Run the hub. Returns 0 if the hub ends because of SIGTERM (with `--parent`: END_SIGNAL) or because the parent
    process has ended. If the hub cannot start, the exit status is 2 and the reason is printed on stderr.

    With `in_terminal`, Ctrl-C ends the hub; otherwise the hub ignores Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog=prog, description="The hub of one training run.")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--dir", required=True, type=Path, help="run folder; created if it does not exist")
    parser.add_argument(
        "--sockets",
        type=Path,
        help="directory for the sockets (default: the previous hub's, else a new private one)",
    )
    parser.add_argument(
        "--listen", metavar=LEGAL_LISTEN, help="listen on TCP too, for peers with a key; auto: loopback"
    )
    parser.add_argument(
        "--keys",
        type=Path,
        help="key folder (default COCKPIT_KEYS, else cockpit/keys in the configuration folder)",
    )
    parser.add_argument("--parent", type=int, help="process id; the hub ends when this process ends")
    parser.add_argument(
        "--on-alert",
        default=os.environ.get(ON_ALERT),
        help="command that receives each alert as JSON, or URL to POST it to; slack+URL posts messages for Slack "
        f"(default: ${ON_ALERT})",
    )
    parser.add_argument(
        "--record-mb",
        type=int,
        default=DEFAULT_RECORD_MB,
        metavar="MB",
        help="disk space for the full recording; older parts are thinned and take up to a quarter more; "
        f"0: no recording (default {DEFAULT_RECORD_MB})",
    )
    parser.add_argument(
        "--memory-mb",
        type=int,
        default=MEMORY_MB,
        metavar="MB",
        help="resident memory above which the hub restarts from its journal; "
        f"at least {LEAST_MB} (default {MEMORY_MB})",
    )
    parser.add_argument("--json", action="store_true", help="print the endpoints as one line of JSON")
    arguments = parser.parse_args(words)
    if arguments.memory_mb < LEAST_MB:
        parser.exit(
            2,
            f"the hub cannot start: --memory-mb {arguments.memory_mb} is too low; legal: {LEAST_MB} or "
            f"more\n",
        )
    endings = ending_signals(arguments.parent is not None, in_terminal)
    # A rank that has sent its last messages may end the hub as soon as its sockets are bound.
    early: list[int] = []
    for ending in endings:
        signal.signal(ending, lambda number, _frame: early.append(number))
    raise_file_limit()
    # Messages hold no reference cycles, so the garbage collector can run rarely.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    try:
        check_room()
        arguments.dir.mkdir(parents=True, exist_ok=True)
        places = _places(arguments.listen, arguments.dir)
        lock = lock_for_hub(arguments.dir)
        endpoints = _endpoints(arguments.dir, arguments.sockets)
        keys = KeyStore(arguments.keys or keys_folder()) if places else None
        notifier = Notifier(arguments.run, arguments.on_alert) if arguments.on_alert else None
        record = Limits.of(arguments.record_mb)
        try:
            hub = Hub(
                arguments.run,
                arguments.dir,
                endpoints,
                arguments.parent,
                notifier,
                places,
                keys,
                record,
                MemoryLimit(arguments.memory_mb << 20),
            )
        except RunError:
            remove_sockets(endpoints)
            raise
        for ending in endings:
            signal.signal(ending, lambda _signal, _frame: hub.stop())
        if early:
            hub.stop()
        file = hub.self_repair.write_file()
    except (RunError, OSError) as error:
        parser.exit(2, f"the hub cannot start: {clean(str(error))}\n")
    if arguments.json:
        sys.stdout.write(f"{msgspec.json.encode(file).decode()}\n")
        sys.stdout.flush()
    hub.run()
    lock.close()
    if hub.outgrown:
        # Replace the process image: the process id stays the same for supervisors, and all memory is freed.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    return 0
