"""Limits connections so that a hub never runs out of file descriptors.

libzmq accepts every connection. When no descriptor is left, libzmq retries in a busy loop, and nothing else in the
process can open a file. So the hub keeps a reserve of descriptors, and closes each connection that takes a descriptor
from the reserve.
"""

import contextlib
import resource
import socket
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

# Number of descriptors that TCP connections must leave free, for local peers and files.
RESERVE_TCP: Final = 48
RESERVE_IPC: Final = 16  # number of descriptors that local connections must leave free, for files


class Admission:
    """Closes new connections of a listening socket when too few file descriptors are left. `turned_away`: connections
    closed since the caller last reset it to 0.
    """

    def __init__(self, listening: zmq.Socket[bytes], reserve: int) -> None:
        self.turned_away = 0
        self._listening = listening
        self._reserve = reserve
        self.monitor = listening.get_monitor_socket(zmq.EVENT_ACCEPTED)

    def close_excess(self) -> None:
        """Close each new connection that has taken a file descriptor from the reserve."""
        while self.monitor.poll(0):
            descriptor = recv_monitor_message(self.monitor)["value"]
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            # The kernel assigns the lowest free descriptor, so all lower ones are in use.
            in_reserve = limit != resource.RLIM_INFINITY and descriptor >= limit - self._reserve
            if in_reserve and _shut(descriptor):
                self.turned_away += 1

    def close(self) -> None:
        """Close the monitor. Must be called before the socket is closed; otherwise the context waits for the
        monitor.
        """
        self._listening.disable_monitor()
        self.monitor.close(0)


def _shut(descriptor: int) -> bool:
    """Shut down one of libzmq's connections; libzmq then closes its descriptor. Returns False if the connection is
    already closed.
    """
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=descriptor)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
        return True
    return False
