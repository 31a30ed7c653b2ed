"""The entry point of a relay process: parses the options, binds the sockets, handles signals and sets the exit status.

python -m agents.hub.relay --run NAME --hub RUN|URL [--sockets DIR] [--key FILE] [--parent PID]
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from agents import protocol
from agents.hub.relay.node import Node
from agents.rundir import runs
from agents.rundir.hub_supervisor import ending_signals
from agents.rundir.runs import RunError
from agents.rundir.socket_directory import (
    check_socket_directory,
    endpoints_in,
    make_socket_directory,
    remove_sockets,
)
from agents.transport.addresses import is_tcp
from agents.transport.curve_keys import find_key, key_folder
from agents.transport.limits import raise_file_limit
from agents.transport.reconnecting import ReconnectingSocket
from agents.transport.roles import Role
from agents.transport.server_sockets import ServerSocket


def main(
    words: Sequence[str] | None = None, prog: str = "python -m agents.hub.relay", in_terminal: bool = False
) -> int:
    """Run a relay. Returns 0 when the relay is stopped by SIGTERM (with `--parent`: by END_SIGNAL) or by Ctrl-C in a
    terminal, or when the parent process has ended. The exit status is 2 if the relay cannot start.
    """
    parser = argparse.ArgumentParser(prog=prog, description="Connects the ranks of one node to a run's hub.")
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--hub", required=True, metavar="RUN|URL", help="run folder, ipc:// or tcp://")
    parser.add_argument(
        "--sockets", type=Path, help="directory for the ranks' socket (default: a new private one)"
    )
    parser.add_argument("--key", type=Path, metavar="FILE", help="key of the role rank, for a hub over TCP")
    parser.add_argument("--parent", type=int, help="process id; the relay ends when this process ends")
    arguments = parser.parse_args(words)
    endings = ending_signals(arguments.parent is not None, in_terminal)
    raise_file_limit()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        sockets = arguments.sockets or make_socket_directory()
        check_socket_directory(sockets)
        endpoints = endpoints_in(sockets)
        found = runs.resolve(arguments.hub, Path("runs"))
        hub = found.ranks
        key = find_key([Role.RANK], arguments.key, key_folder(found), found.hub) if is_tcp(hub) else None
        hub_socket = ReconnectingSocket(hub, key, immediate=True, high_water=16, reconnect_max_ms=2000)
        server_socket = ServerSocket(context, b"r", Role.RANK)
        server_socket.bind(endpoints.ranks)
    except (RunError, OSError) as error:
        parser.exit(2, f"the relay cannot start: {protocol.clean(str(error))}\n")
    node = Node(arguments.run, hub_socket, server_socket)
    for ending in endings:
        signal.signal(ending, lambda _signal, _frame: node.stop())
    sys.stdout.write(f"{endpoints.ranks}\n")  # tells the launcher the endpoint for the ranks of this node
    sys.stdout.flush()
    node.run(arguments.parent)
    context.term()
    remove_sockets(endpoints)
    return 0
